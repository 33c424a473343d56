"""Attention of prefix trees on an NVIDIA GPU by a Triton kernel, without a mask in memory.

cuDNN takes the visibility of a tree as a dense bias `[B, 1, L, L]`, computes blocks of it that are
entirely masked, and writes a gradient of the bias that has no use. This kernel reads one place
per key (see `splash`) and visits only pairs of blocks that are at least partly visible. It is
FlashAttention (Dao 2023, arXiv 2307.08691) over lists of blocks:

  forward    of a block of queries, over its blocks of keys       out, and the log2 of the sums
  queries    of a block of queries, over its blocks of keys       the gradient of q
  keys       of a block of keys, over its blocks of queries       the gradients of k and v

Scores are in log2 units, since GPUs compute powers of 2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jax_ragrl.models.splash import block_kinds, on_own_rows_and_heads
from jax_ragrl.runtime.sharding import axis_size, target_platform

SIDE = 64  # queries and keys of a block
WIDTHS = (16, 32, 64, 128)  # of heads
MASKED = -1e30  # a score; not -inf, whose differences are nan

Sums = tuple[Array, ...]


def tree_kernel_supports(length: int, width: int, kv_heads: int) -> bool:
    """Returns whether the kernel takes these sizes.

    On a mesh the tensor axis must split the key-value heads as it splits the query heads (see
    `Rules`).

    Args:
      length: tokens of a row, a multiple of `SIDE`.
      width: numbers per head, one of `WIDTHS`.
      kv_heads: the number of key-value heads.
    """
    return length % SIDE == 0 and width in WIDTHS and kv_heads % axis_size("tensor") == 0


def tree_attention(q_BLHF: Array, k_BLKF: Array, v_BLKF: Array, until_BL: Array | None) -> Array:
    """Returns what `splash` returns, for the sizes of `tree_kernel_supports`.

    Args:
      q_BLHF, k_BLKF, v_BLKF, until_BL: as in `splash`.
    """
    if until_BL is None:
        until_BL = jnp.full(q_BLHF.shape[:2], q_BLHF.shape[1], jnp.int32)
    return on_own_rows_and_heads(_on_device, q_BLHF, k_BLKF, v_BLKF, until_BL)


@jax.custom_vjp
def _on_device(q_BLHF: Array, k_BLKF: Array, v_BLKF: Array, until_BL: Array) -> Array:
    return _forward(q_BLHF, k_BLKF, v_BLKF, until_BL)[0]


def _forward(q: Array, k: Array, v: Array, until_BL: Array) -> tuple[Array, Sums]:
    """Returns the output, and all that the backward pass needs."""
    batch, length, heads, _ = q.shape
    norm_BHL = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    out, norm = _call(_forward_kernel, q, (k, v), (q,), until_BL, (q, norm_BHL), by_key=False)
    return out, (q, k, v, until_BL, out, norm)


def _backward(residuals: Sums, d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, until_BL, out, norm_BHL = residuals
    # Each score's gradient subtracts the mean of the gradients under the weights of its query.
    mean_BLH = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    inputs = (q, d_out, norm_BHL, jnp.swapaxes(mean_BLH, 1, 2))
    (d_q,) = _call(_query_kernel, q, (k, v), inputs, until_BL, (q,), by_key=False)
    d_k, d_v = _call(_key_kernel, q, (k, v), inputs, until_BL, (k, v), by_key=True)
    return d_q, d_k, d_v, None


_on_device.defvjp(_forward, _backward)


def _call(
    kernel: Any,
    q: Array,
    keys: tuple[Array, Array],
    queries: Sums,
    until_BL: Array,
    outputs: tuple[Any, ...],
    *,
    by_key: bool,
) -> list[Array]:
    """Runs a kernel on all blocks of queries, or of keys.

    Args:
      kernel: the kernel.
      q: the queries, for the sizes.
      keys: keys and values.
      queries: arrays with one entry per query, `[B, L, H, F]` or `[B, H, L]`.
      until_BL: the places up to which keys are visible.
      outputs: shapes and dtypes of the outputs, like `queries`, or with `by_key` like `keys`.
      by_key: whether a block of keys visits the blocks of queries of all its G query heads, instead
        of a block of queries of one head its blocks of keys.
    """
    batch, length, heads, width = q.shape
    kv_heads = keys[0].shape[2]
    group = heads // kv_heads
    call = pl.pallas_call(
        functools.partial(kernel, scale=width**-0.5),
        grid=(length // SIDE, batch, kv_heads if by_key else heads),
        in_specs=[
            *(_own_block(x) if by_key else _keys_of_head(x, group) for x in keys),
            *(_queries_of_group(x, group) if by_key else _own_block(x) for x in queries),
            *_specs_of_visits(length),
        ],
        out_specs=[*map(_own_block, outputs)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        compiler_params=_compiler_params(),
        interpret=target_platform() != "gpu",
        name=kernel.__name__,
    )
    # Kernels promote dtypes and ranks, also if the caller forbids it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        results: list[Array] = call(*keys, *queries, until_BL, *_visits(until_BL, by_key=by_key))
    return results


# A program has the number of a block, of a row and of a head. It gets a block of its own head, and
# the whole row of what it visits: the keys of its head, or the queries of all heads of its group.


def _own_block(x: Any) -> pl.BlockSpec:
    if x.ndim == 4:
        return pl.BlockSpec((None, SIDE, None, x.shape[3]), lambda i, b, h: (b, i, h, 0))
    return pl.BlockSpec((None, None, SIDE), lambda i, b, h: (b, h, i))


def _keys_of_head(x: Any, group: int) -> pl.BlockSpec:
    _, length, _, width = x.shape
    return pl.BlockSpec((None, length, None, width), lambda i, b, h: (b, 0, h // group, 0))


def _queries_of_group(x: Any, group: int) -> pl.BlockSpec:
    if x.ndim == 4:
        return pl.BlockSpec((None, x.shape[1], group, x.shape[3]), lambda i, b, h: (b, 0, h, 0))
    return pl.BlockSpec((None, group, x.shape[2]), lambda i, b, h: (b, h, 0))


def _compiler_params() -> Any:
    from jax.experimental.pallas import triton  # takes a tenth of a second, for GPUs alone

    return triton.CompilerParams(num_warps=4, num_stages=2)


def _specs_of_visits(length: int) -> tuple[pl.BlockSpec, ...]:
    """Returns the specs of the places of keys, and of the results of `_visits`."""
    return (
        pl.BlockSpec((None, length), lambda i, b, h: (b, 0)),
        pl.BlockSpec((None, None, length // SIDE), lambda i, b, h: (b, i, 0)),
        pl.BlockSpec((None, 1), lambda i, b, h: (b, i)),
    )


def _visits(until_BL: Array, *, by_key: bool) -> tuple[Array, Array]:
    """Returns the blocks that each block visits, int32 `[B, I, J]`, and their number, `[B, I]`.

    The visited blocks come first in a row, ascending.
    """
    starts_I = jnp.arange(0, until_BL.shape[1], SIDE, dtype=jnp.int32)
    is_masked_BIJ = block_kinds(until_BL.reshape(until_BL.shape[0], -1, SIDE), starts_I) == 0
    is_masked_BIJ = jnp.swapaxes(is_masked_BIJ, 1, 2) if by_key else is_masked_BIJ
    numbers_BIJ = jnp.argsort(is_masked_BIJ, axis=-1, stable=True).astype(jnp.int32)
    return numbers_BIJ, jnp.sum(~is_masked_BIJ, axis=-1, dtype=jnp.int32)


# --- Kernels --------------------------------------------------------------------------------------
# The axes of blocks: Q queries, K keys, F numbers of a head.


def _forward_kernel(*refs: Any, scale: float) -> None:
    k_ref, v_ref, q_ref, *visits, out_ref, norm_ref = refs
    until_ref, numbers_ref, count_ref = visits
    q_QF, first = q_ref[...], _own_start()

    def attend(n: Array, sums: Sums) -> Sums:
        out_QF, total_Q, top_Q = sums
        keys = _block(numbers_ref[n])
        score_QK = _scores(q_QF, k_ref[keys, :], until_ref[keys], first, keys.start, scale)
        new_top_Q = jnp.maximum(top_Q, jnp.max(score_QK, axis=1))
        weight_QK, decay_Q = jnp.exp2(score_QK - new_top_Q[:, None]), jnp.exp2(top_Q - new_top_Q)
        out_QF = out_QF * decay_Q[:, None] + _dot(weight_QK.astype(q_QF.dtype), v_ref[keys, :])
        return out_QF, total_Q * decay_Q + jnp.sum(weight_QK, axis=1), new_top_Q

    start = (
        jnp.zeros(q_QF.shape, jnp.float32),
        jnp.zeros(SIDE, jnp.float32),
        jnp.full(SIDE, MASKED, jnp.float32),
    )
    out_QF, total_Q, top_Q = jax.lax.fori_loop(0, count_ref[0], attend, start)
    out_ref[...] = (out_QF / total_Q[:, None]).astype(out_ref.dtype)
    norm_ref[...] = top_Q + jnp.log2(total_Q)


def _query_kernel(*refs: Any, scale: float) -> None:
    k_ref, v_ref, q_ref, d_out_ref, norm_ref, mean_ref, *visits, d_q_ref = refs
    until_ref, numbers_ref, count_ref = visits
    q_QF, d_out_QF, first = q_ref[...], d_out_ref[...], _own_start()
    norm_Q, mean_Q = norm_ref[...], mean_ref[...]

    def add(n: Array, d_q_QF: Array) -> Array:
        keys = _block(numbers_ref[n])
        k_KF = k_ref[keys, :]
        score_QK = _scores(q_QF, k_KF, until_ref[keys], first, keys.start, scale)
        weight_QK = jnp.exp2(score_QK - norm_Q[:, None])
        d_score_QK = weight_QK * (_dot(d_out_QF, v_ref[keys, :].T) - mean_Q[:, None])
        return d_q_QF + _dot(d_score_QK.astype(k_KF.dtype), k_KF)

    start = jnp.zeros(q_QF.shape, jnp.float32)
    d_q_QF = jax.lax.fori_loop(0, count_ref[0], add, start)
    d_q_ref[...] = (d_q_QF * scale).astype(d_q_ref.dtype)


def _key_kernel(*refs: Any, scale: float) -> None:
    k_ref, v_ref, q_ref, d_out_ref, norm_ref, mean_ref, *visits, d_k_ref, d_v_ref = refs
    until_ref, numbers_ref, count_ref = visits
    k_KF, v_KF, first = k_ref[...], v_ref[...], _own_start()
    until_K = until_ref[_slice(first)]

    def add(n: Array, sums: Sums) -> Sums:
        d_k_KF, d_v_KF = sums
        # All blocks of the first head of the group, then of the next one.
        head = jax.lax.div(n, count_ref[0])
        queries = _block(numbers_ref[jax.lax.rem(n, count_ref[0])])
        q_QF, d_out_QF = q_ref[queries, head, :], d_out_ref[queries, head, :]
        score_QK = _scores(q_QF, k_KF, until_K, queries.start, first, scale)
        weight_QK = jnp.exp2(score_QK - norm_ref[head, queries][:, None])
        d_v_KF = d_v_KF + _dot(weight_QK.astype(q_QF.dtype).T, d_out_QF)
        d_score_QK = weight_QK * (_dot(d_out_QF, v_KF.T) - mean_ref[head, queries][:, None])
        return d_k_KF + _dot(d_score_QK.astype(q_QF.dtype).T, q_QF), d_v_KF

    zeros = jnp.zeros(k_KF.shape, jnp.float32)
    visits = count_ref[0] * q_ref.shape[1]
    d_k_KF, d_v_KF = jax.lax.fori_loop(0, visits, add, (zeros, zeros))
    d_k_ref[...] = (d_k_KF * scale).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v_KF.astype(d_v_ref.dtype)


def _own_start() -> Array:
    """Returns the place of the first entry of the block of this program."""
    return pl.program_id(0) * SIDE


def _slice(start: Array) -> Any:
    return pl.ds(start, SIDE)


def _block(number: Array) -> Any:
    return _slice(number * SIDE)


def _scores(
    q_QF: Array, k_KF: Array, until_K: Array, first_query: Any, first_key: Any, scale: float
) -> Array:
    """Returns the masked scores of a pair of blocks in log2 units, float32 `[Q, K]`."""
    score_QK = _dot(q_QF, k_KF.T) * (scale * math.log2(math.e))
    query_Q1 = (first_query + jnp.arange(SIDE))[:, None]
    key_1K = (first_key + jnp.arange(SIDE))[None, :]
    is_visible_QK = (key_1K <= query_Q1) & (query_Q1 < until_K[None, :])
    return jnp.where(is_visible_QK, score_QK, MASKED)


def _dot(x: Array, y: Array) -> Array:
    """Returns a product with sums in float32."""
    # The default precision of float32 would round factors to TF32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
