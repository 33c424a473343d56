"""Train multi-agent retrieval-augmented generation systems with reinforcement learning, in JAX."""

__version__ = "0.1.0"
