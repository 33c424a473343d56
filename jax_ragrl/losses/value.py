"""Value losses: what pulls a critic towards the returns."""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jax import Array


def value_loss(value: Array, target: Array, mask: Array) -> Array:
    """Half the squared error of each value, `L = (V - G)^2 / 2`; 0 where `mask` is False."""
    chex.assert_equal_shape([value, target, mask])
    return 0.5 * jnp.square(jnp.where(mask, value - target, 0.0))


def clipped_value_loss(
    value: Array, old_value: Array, target: Array, mask: Array, *, clip: float = 0.2
) -> Array:
    """Half the larger squared error of the value and its clipped self; 0 where masked.

      L = max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2) / 2

    Schulman et al. 2017, as in the authors' published implementation.
    """
    chex.assert_equal_shape([value, old_value, target, mask])
    value, old_value, target = (jnp.where(mask, x, 0.0) for x in (value, old_value, target))
    near = old_value + jnp.clip(value - old_value, -clip, clip)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(near - target))
