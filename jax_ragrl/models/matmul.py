"""The matmul of the package's models: operands in the compute dtype, sums in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def einsum_f32(subscripts: str, x: Array, y: Array) -> Array:
    """Returns `einsum(subscripts, x, y)` in float32, whatever the dtype of `x` and `y`."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
