"""Into the vocabulary and out of it: products in the compute dtype, gradients summed in float32.

A token that is frequent in a batch gets thousands of small cotangents; in bfloat16 their sum stops
growing. So the gradient of a table goes around its copy in the compute dtype: into a `sink`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.matmul import product
from jax_ragrl.runtime.sharding import constrain


def copied(table_VD: Array, dtype: Any) -> Array:
    """A table in the compute dtype, its rows whole on every device; it takes no gradient."""
    return constrain(jax.lax.stop_gradient(table_VD).astype(dtype), ("vocab", None))


@jax.custom_vjp
def sink(table_VD: Array) -> Array:
    """Zeros, float32 `[V, D]`, whose cotangent is the table's."""
    return jnp.zeros(table_VD.shape, jnp.float32)


sink.defvjp(
    lambda table_VD: (sink(table_VD), table_VD[:0]),
    lambda kept, grad_VD: (grad_VD.astype(kept.dtype),),
)


@jax.custom_vjp
def look_up(copy_VD: Array, sink_VD: Array, ids: Array) -> Array:
    """The rows of tokens, `[..., D]` in the dtype of the copy."""
    return copy_VD[ids]


def _look_up_forward(copy_VD: Array, sink_VD: Array, ids: Array) -> tuple[Array, tuple[Array, ...]]:
    return copy_VD[ids], (sink_VD, ids)


def _look_up_backward(kept: tuple[Array, ...], grad: Array) -> tuple[None, Array, None]:
    sink_VD, ids = kept
    return None, jnp.zeros_like(sink_VD).at[ids].add(grad.astype(jnp.float32)), None


look_up.defvjp(_look_up_forward, _look_up_backward)


@jax.custom_vjp
def project(copy_VD: Array, sink_VD: Array, hidden: Array) -> Array:
    """Logits, float32 `[..., V]`, of hidden states `[..., D]` in the dtype of the copy.

    The backward pass multiplies in that dtype too, and sums in float32.
    """
    return product("...d,vd->...v", hidden, copy_VD)


def _project_forward(
    copy_VD: Array, sink_VD: Array, hidden: Array
) -> tuple[Array, tuple[Array, Array]]:
    return project(copy_VD, sink_VD, hidden), (copy_VD, hidden)


def _project_backward(kept: tuple[Array, Array], grad: Array) -> tuple[None, Array, Array]:
    copy_VD, hidden = kept
    grad_NV = grad.astype(hidden.dtype).reshape(-1, grad.shape[-1])
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    back_ND = product("nv,vd->nd", grad_NV, copy_VD).astype(hidden.dtype)
    return None, product("nv,nd->vd", grad_NV, hidden_ND), back_ND.reshape(hidden.shape)


project.defvjp(_project_forward, _project_backward)
