"""The product of the package's models: operands in the compute dtype, the sum in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def product(form: str, x: Array, y: Array) -> Array:
    """`einsum`, float32 whatever the dtype of `x` and `y`."""
    return jnp.einsum(form, x, y, preferred_element_type=jnp.float32)
