"""Checksums of arrays, computed on their devices: a flipped bit anywhere changes the sum.

  checksum(x) = sum_i bits(x_i) (2 i + 1)  mod 2^32

A flipped bit k changes the sum by 2^k (2 i + 1), which is not a multiple of 2^32. The sum is
independent of the sharding, and no array leaves its devices.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.sharding import to_host

# Unsigned integers by the size of an element in bytes.
BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(arrays: dict[str, Any]) -> dict[str, int]:
    """Returns the checksum of each array, below 2**32.

    Args:
      arrays: arrays of elements of one, two or four bytes, by path.
    """
    sums = to_host(_checksums(list(arrays.values())))
    return {path: int(value) for path, value in zip(arrays, sums, strict=True)}


@in_order
@jax.jit
def _checksums(arrays: list[Array]) -> list[Array]:
    return [_checksum(x) for x in arrays]


def _checksum(x: Array) -> Array:
    number = jnp.zeros(x.shape, jnp.uint32)
    # From the number of each axis, because a reshape to one axis would gather a sharded array.
    for axis in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        number = number + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    wide = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = jax.lax.bitcast_convert_type(wide, BITS[wide.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(bits * (np.uint32(2) * number + np.uint32(1)), dtype=jnp.uint32)
