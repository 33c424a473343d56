"""Train multi-agent retrieval-augmented generation systems with reinforcement learning, in JAX."""

import logging

__version__ = "0.1.0"

# Models here are Flax's: that Transformers finds no PyTorch for its own is no news.
logging.getLogger("transformers").addFilter(
    lambda record: not record.getMessage().startswith("PyTorch was not found")
)
