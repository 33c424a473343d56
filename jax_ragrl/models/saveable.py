"""Activations in the form in which a loop over layers keeps them.

XLA for CPUs cannot write bfloat16 into a part of an array: to keep the activations of one layer it
converts the array of all layers to float32 and back, in every layer (JAX 0.10). Integers of 16 bits
are written in place, so bfloat16 is kept as its bits on a CPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jax_ragrl.runtime.sharding import target_platform

# Names for the policies of `jax.checkpoint`: products with weights, and the input of a layer.
PRODUCT, STREAM = "product", "stream"


def pack(x: Array) -> Array:
    """Returns the bits of a bfloat16 array on a CPU as uint16; any other array as it is."""
    return _bits(x) if _is_packed(x) else x


def unpack(x: Array, dtype: jnp.dtype) -> Array:
    """Returns the array of a dtype that `pack` was called with."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def saveable(x: Array, name: str) -> Array:
    """Returns `x`; on a CPU, policies of `jax.checkpoint` can save bfloat16 by a name, as bits."""
    return _saveable(x, name) if _is_packed(x) else x


def _is_packed(x: Array) -> bool:
    return x.dtype == jnp.bfloat16 and target_platform() == "cpu"


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _saveable(x: Array, name: str) -> Array:
    return x


@_saveable.defjvp
def _saveable_jvp(name: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    return unpack(checkpoint_name(_bits(x), name), x.dtype), tangent
