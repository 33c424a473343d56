"""Experiments: the whole job of one system, and systems over several seeds."""
