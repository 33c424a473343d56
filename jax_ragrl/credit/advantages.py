"""Advantages: credit compared with what was expected."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def whiten(x: Array, mask: Array) -> Array:
    """Zero mean and unit standard deviation over what `mask` keeps; 0 elsewhere. Any shape."""
    count = jnp.maximum(jnp.sum(mask, dtype=x.dtype), 1)
    mean = jnp.sum(x, where=mask) / count
    variance = jnp.sum(jnp.square(x - mean), where=mask) / count
    return jnp.where(mask, (x - mean) / jnp.sqrt(variance + 1e-8), 0.0)
