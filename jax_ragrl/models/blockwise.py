"""Exact causal attention over pairs of blocks that skips pairs in which everything is masked.

In a row that holds a prefix tree most pairs are masked. The others are visited one at a time with a
running maximum and sum, and the backward pass recomputes their probabilities from the log-sum-exp
(FlashAttention, Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4). Branches at run time skip
pairs, which suits a CPU, but not an accelerator, whose host would wait at every branch.

Shapes: blocks have `size` queries `l` and `size` keys `s`; I and J number blocks of queries and of
keys. Scores, sums and gradients are float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.matmul import einsum_f32

# Finite, so that a maximum over masked scores alone gives no nan in a difference.
LOWEST = jnp.finfo(jnp.float32).min


# What the backward pass needs: inputs, output, and the log-sum-exp of each query, `[B, K, G, L]`.
Residuals = tuple[Array, Array, Array, Array, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise(q_BLKGF: Array, k_BLKF: Array, v_BLKF: Array, mask_BLL: Array, size: int) -> Array:
    """Returns `softmax(q k / sqrt(F)) v` under a mask, in the shape and dtype of the queries.

    The bool mask hides every later key and shows each query at least itself. G queries share a
    key-value head; `size` is the side of a block and divides L.
    """
    return _forward(q_BLKGF, k_BLKF, v_BLKF, mask_BLL, size)[0]


def _block(x: Array, number: Array, size: int, axis: int = 1) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _visible_pairs(mask_BLL: Array, size: int) -> Array:
    """Returns which pairs of blocks are visible in any part of any row, bool `[I, J]`."""
    count = mask_BLL.shape[1] // size
    return jnp.any(mask_BLL.reshape(-1, count, size, count, size), axis=(0, 2, 4))


def _scores(q: Array, k: Array, mask_BLL: Array, i: Array, j: Array) -> Array:
    """Returns the scaled scores of a pair of blocks, float32 `[B, K, G, l, s]`."""
    size = q.shape[1]
    mask = _block(_block(mask_BLL, i, size), j, size, 2)[:, None, None]
    scores = einsum_f32("blkgf,bskf->bkgls", q, k)
    return jnp.where(mask, scores * jnp.float32(q.shape[-1] ** -0.5), LOWEST)


def _forward(
    q_BLKGF: Array, k_BLKF: Array, v_BLKF: Array, mask_BLL: Array, size: int
) -> tuple[Array, Residuals]:
    """Algorithm 1: for each block of queries, an online softmax over the blocks of keys."""
    batch, length, kv, group, width = q_BLKGF.shape
    visible_IJ = _visible_pairs(mask_BLL, size)

    def attend(i: Array) -> tuple[Array, Array]:
        q = _block(q_BLKGF, i, size)

        def visit(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            # 1. The new maximum; sums so far are rescaled from the old one to it.
            highest, total, out = carry
            scores = _scores(q, _block(k_BLKF, j, size), mask_BLL, i, j)
            top = jnp.maximum(highest, jnp.max(scores, axis=-1))
            probs, rescale = jnp.exp(scores - top[..., None]), jnp.exp(highest - top)
            # 2. Add the sum of probabilities and the weighted values of this block.
            v = _block(v_BLKF, j, size)
            more = einsum_f32("bkgls,bskf->bkglf", probs.astype(v.dtype), v)
            total = total * rescale + jnp.sum(probs, axis=-1)
            return top, total, out * rescale[..., None] + more

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return jax.lax.cond(visible_IJ[i, j], visit, lambda _, carry: carry, j, carry)

        zero = jnp.zeros((batch, kv, group, size), jnp.float32)
        start = (zero + LOWEST, zero, jnp.zeros((*zero.shape, width), jnp.float32))
        # The diagonal block is last and shows every query at least one key. If all keys before it
        # are masked, its maximum rescales their sums to zero.
        highest, total, out = jax.lax.fori_loop(0, i + 1, step, start)
        return out / total[..., None], highest + jnp.log(total)

    out, lse = jax.lax.map(attend, jnp.arange(length // size))
    out_BKGLF = jnp.moveaxis(out, 0, 3).reshape(batch, kv, group, length, width)
    out_BLKGF = jnp.transpose(out_BKGLF, (0, 3, 1, 2, 4)).astype(q_BLKGF.dtype)
    lse_BKGL = jnp.moveaxis(lse, 0, 3).reshape(batch, kv, group, length)
    return out_BLKGF, (q_BLKGF, k_BLKF, v_BLKF, mask_BLL, out_BLKGF, lse_BKGL)


def _backward(
    size: int, residuals: Residuals, dout_BLKGF: Array
) -> tuple[Array, Array, Array, None]:
    """Algorithm 4: for each block of keys, the gradients of all blocks of queries from it on."""
    q_BLKGF, k_BLKF, v_BLKF, mask_BLL, out_BLKGF, lse_BKGL = residuals
    count, scale = q_BLKGF.shape[1] // size, jnp.float32(q_BLKGF.shape[-1] ** -0.5)
    visible_IJ = _visible_pairs(mask_BLL, size)
    # The term of the softmax's backward pass that is common to all keys: sum(dout * out).
    delta_BKGL = einsum_f32("blkgf,blkgf->bkgl", dout_BLKGF, out_BLKGF)

    def backward_keys(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, v = _block(k_BLKF, j, size), _block(v_BLKF, j, size)

        def visit(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            # 1. Recompute the probabilities of the pair: exp(score - lse).
            dq_BLKGF, dk, dv = sums
            q, dout = _block(q_BLKGF, i, size), _block(dout_BLKGF, i, size)
            lse, delta = (_block(x, i, size, 3)[..., None] for x in (lse_BKGL, delta_BKGL))
            probs = jnp.exp(_scores(q, k, mask_BLL, i, j) - lse)
            # 2. Backward through the weighted values, then through the softmax and the scores.
            dv = dv + einsum_f32("bkgls,blkgf->bskf", probs.astype(dout.dtype), dout)
            dprobs = einsum_f32("blkgf,bskf->bkgls", dout, v)
            dscores = (probs * (dprobs - delta) * scale).astype(q.dtype)
            dk = dk + einsum_f32("bkgls,blkgf->bskf", dscores, q)
            dq = _block(dq_BLKGF, i, size) + einsum_f32("bkgls,bskf->blkgf", dscores, k)
            return jax.lax.dynamic_update_slice_in_dim(dq_BLKGF, dq, i * size, 1), dk, dv

        def step(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return jax.lax.cond(visible_IJ[i, j], visit, lambda _, sums: sums, i, sums)

        def put(x: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), j * size, 1)

        zero = jnp.zeros(k.shape, jnp.float32)
        dq_BLKGF, dk, dv = jax.lax.fori_loop(j, count, step, (sums[0], zero, zero))
        return dq_BLKGF, put(sums[1], dk), put(sums[2], dv)

    # Queries are visited once per block of keys, so their sum stays float32 until the end; a block
    # of keys is complete after its own iteration.
    start = (jnp.zeros(q_BLKGF.shape, jnp.float32), jnp.zeros_like(k_BLKF), jnp.zeros_like(v_BLKF))
    dq_BLKGF, dk_BLKF, dv_BLKF = jax.lax.fori_loop(0, count, backward_keys, start)
    return dq_BLKGF.astype(q_BLKGF.dtype), dk_BLKF, dv_BLKF, None


blockwise.defvjp(_forward, _backward)
