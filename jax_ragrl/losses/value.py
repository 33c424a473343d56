"""Value losses: they move the values of a critic towards the returns."""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jax import Array


def value_loss(value: Array, target: Array, mask: Array) -> Array:
    """Computes half the squared error of each value, `L = (V - G)^2 / 2`.

    Args:
      value: float32, the critic's value of each token.
      target: float32, the return of each token; all arrays have one shape.
      mask: bool; the loss is 0 at False, and the other arrays may hold any value there.
    """
    chex.assert_equal_shape([value, target, mask])
    return 0.5 * jnp.square(jnp.where(mask, value - target, 0.0))


def clipped_value_loss(
    value: Array, old_value: Array, target: Array, mask: Array, *, clip: float = 0.2
) -> Array:
    """Computes half the larger squared error of the value and the clipped value.

      L = max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2) / 2

    Schulman et al. 2017, as in the authors' published implementation.

    Args:
      value, target, mask: as in `value_loss`.
      old_value: float32, the value before the update.
      clip: the largest change of the value that reduces the loss.
    """
    chex.assert_equal_shape([value, old_value, target, mask])
    # Mask first: a nan outside the mask times a zero cotangent would still be a nan.
    value, old_value, target = (jnp.where(mask, x, 0.0) for x in (value, old_value, target))
    near = old_value + jnp.clip(value - old_value, -clip, clip)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(near - target))
