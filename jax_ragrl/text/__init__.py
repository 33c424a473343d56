"""What is read and written: tokenizer, prompt templates, answer metrics."""
