"""Measurements that print JSON: loading, a train step, a whole step, other libraries."""
