"""Embedding lookup and logits: the compute dtype forward, gradients summed in float32.

A token that is frequent in a batch receives thousands of small cotangents, and in bfloat16 their
sum stops growing. Therefore the gradient of a table is accumulated in a float32 buffer
(`gradient_sink`) and not in the table's copy in the compute dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jax_ragrl.models.matmul import einsum_f32
from jax_ragrl.runtime.sharding import axis_size, batch_axes, constrain


def compute_copy(table_VD: Array, dtype: Any) -> Array:
    """Returns a table in the compute dtype with whole rows on every device, without gradient."""
    return constrain(jax.lax.stop_gradient(table_VD).astype(dtype), ("vocab", None))


@jax.custom_vjp
def gradient_sink(table_VD: Array) -> Array:
    """Returns float32 zeros `[V, D]`, whose cotangent becomes the gradient of the table."""
    return jnp.zeros(table_VD.shape, jnp.float32)


gradient_sink.defvjp(
    # The residual has no rows: only its dtype is needed.
    lambda table_VD: (gradient_sink(table_VD), table_VD[:0]),
    lambda empty, grad_VD: (grad_VD.astype(empty.dtype),),
)


@jax.custom_vjp
def look_up(copy_VD: Array, sink_VD: Array, ids: Array) -> Array:
    """Returns the embeddings of int32 token ids of any shape, `[..., D]` in the dtype of the copy.

    The table comes as its `compute_copy` and its `gradient_sink`.
    """
    return copy_VD[ids]


def _look_up_backward(residuals: tuple[Array, ...], grad: Array) -> tuple[None, Array, None]:
    sink_VD, ids = residuals
    # Whether fsdp devices own columns of the table, and each device has rows of tokens.
    owners, rows = axis_size("fsdp"), axis_size("data") * axis_size("fsdp")
    if owners > 1 and sink_VD.shape[1] % owners == 0 and ids.shape[0] % rows == 0:
        return None, _add_on_owners(sink_VD.shape[0], ids, grad), None
    return None, jnp.zeros_like(sink_VD).at[ids].add(grad.astype(jnp.float32)), None


def _add_on_owners(vocab: int, ids: Array, grad: Array) -> Array:
    """Returns the gradient, float32 `[V, D]`, whose columns are split over the axis fsdp.

    A device sends to each other one the columns that the other owns. XLA would sum the gradient of
    the whole table, which is far larger than the cotangents, or gather them in float32.
    """
    axes = batch_axes()

    def on_device(ids: Array, grad: Array) -> Array:
        all_N = jax.lax.all_gather(ids.reshape(-1), "fsdp", tiled=True)
        rows = grad.reshape(-1, grad.shape[-1])
        columns = jax.lax.all_to_all(rows, "fsdp", split_axis=1, concat_axis=0, tiled=True)
        zeros = jnp.zeros((vocab, columns.shape[1]), jnp.float32)
        total = zeros.at[all_N].add(columns.astype(jnp.float32))
        return jax.lax.psum(total, "data") if "data" in axes else total

    on_mesh = jax.shard_map(
        on_device,
        in_specs=(PartitionSpec(axes), PartitionSpec(axes)),
        out_specs=PartitionSpec(None, "fsdp"),
        axis_names=set(axes),
        check_vma=False,
    )
    return on_mesh(ids, grad)


look_up.defvjp(lambda copy_VD, sink_VD, ids: (copy_VD[ids], (sink_VD, ids)), _look_up_backward)


@jax.custom_vjp
def project(copy_VD: Array, sink_VD: Array, hidden: Array) -> Array:
    """Returns the logits, float32 `[..., V]`, of hidden states in the dtype of the copy.

    The other arguments are those of `look_up`, of the head. The backward pass also multiplies in
    the compute dtype and sums in float32.
    """
    return einsum_f32("...d,vd->...v", hidden, copy_VD)


def _project_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[None, Array, Array]:
    copy_VD, hidden = residuals
    # Flattened, the products are plain matmuls that sum over all tokens at once.
    grad_NV = grad.astype(hidden.dtype).reshape(-1, grad.shape[-1])
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    back_ND = einsum_f32("nv,vd->nd", grad_NV, copy_VD).astype(hidden.dtype)
    return None, einsum_f32("nv,nd->vd", grad_NV, hidden_ND), back_ND.reshape(hidden.shape)


project.defvjp(
    lambda copy_VD, sink_VD, hidden: (project(copy_VD, sink_VD, hidden), (copy_VD, hidden)),
    _project_backward,
)
