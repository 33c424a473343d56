"""Benchmarks that print JSON: search, sampling, training steps."""
