"""Benchmarks that print JSON: loading, search, sampling, training steps, other libraries."""
