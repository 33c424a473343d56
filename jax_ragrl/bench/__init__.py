"""Measurements that print JSON: loading, sampling, a train step, a whole step, other libraries."""
