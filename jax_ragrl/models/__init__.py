"""Decoders, value heads, adapters and text encoders, and their Hugging Face folders."""
