"""A question meets the corpus: encoders, searchers, and indexes on disk."""
