"""Retrieval: encoders, searchers, indexes on disk, and remote retrievers."""
