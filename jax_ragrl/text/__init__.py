"""Tokenizer, prompt templates and answer metrics."""
