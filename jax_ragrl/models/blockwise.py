"""Exact causal attention in pairs of blocks, without those in which no query may see a key.

In a row of a prefix tree siblings do not see each other, and packed contexts do not at all: most
pairs of blocks hold nothing. The rest are visited one at a time with a running maximum and sum, and
the backward pass makes their probabilities again from the log-sum-exp (Dao et al. 2022,
FlashAttention, arXiv 2205.14135, algorithms 1 and 4). These are loops that skip at run time: right
for a CPU, whose caches hold a pair, and wrong where a branch waits for a device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.matmul import product

LOWEST = jnp.finfo(jnp.float32).min


class _Kept(NamedTuple):
    """What the backward pass needs: inputs, the output and the log-sum-exp of each query."""

    q_BLKGF: Array
    k_BLKF: Array
    v_BLKF: Array
    mask_BLL: Array
    out_BLKGF: Array
    lse_BKGL: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise(q_BLKGF: Array, k_BLKF: Array, v_BLKF: Array, mask_BLL: Array, size: int) -> Array:
    """`softmax(q k / sqrt(F)) v` where `mask_BLL`, of the shape and dtype of `q`.

    The mask hides every later key and shows each query at least itself; `size` divides L. Scores
    and sums are float32.
    """
    return _forward(q_BLKGF, k_BLKF, v_BLKF, mask_BLL, size)[0]


def _part(x: Array, block: Array, size: int, axis: int = 1) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _visible(mask_BLL: Array, size: int) -> Array:
    """Which pairs of a block of queries and one of keys hold anything, bool `[I, J]`."""
    count = mask_BLL.shape[1] // size
    return jnp.any(mask_BLL.reshape(-1, count, size, count, size), axis=(0, 2, 4))


def _scores(q: Array, k: Array, mask_BLL: Array, i: Array, j: Array) -> Array:
    """Scaled scores of a pair of blocks, float32 `[B, K, G, l, s]`, the lowest where hidden."""
    size = q.shape[1]
    mask = _part(_part(mask_BLL, i, size), j, size, 2)[:, None, None]
    scores = product("blkgf,bskf->bkgls", q, k)
    return jnp.where(mask, scores * jnp.float32(q.shape[-1] ** -0.5), LOWEST)


def _forward(
    q_BLKGF: Array, k_BLKF: Array, v_BLKF: Array, mask_BLL: Array, size: int
) -> tuple[Array, _Kept]:
    batch, length, kv, group, width = q_BLKGF.shape
    visible_IJ = _visible(mask_BLL, size)

    def queries(i: Array) -> tuple[Array, Array]:
        q = _part(q_BLKGF, i, size)

        def visit(j: Array, seen: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, out = seen
            scores = _scores(q, _part(k_BLKF, j, size), mask_BLL, i, j)
            top = jnp.maximum(highest, jnp.max(scores, axis=-1))
            probs, before = jnp.exp(scores - top[..., None]), jnp.exp(highest - top)
            v = _part(v_BLKF, j, size)
            more = product("bkgls,bskf->bkglf", probs.astype(v.dtype), v)
            total = total * before + jnp.sum(probs, axis=-1)
            return top, total, out * before[..., None] + more

        def step(j: Array, seen: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return jax.lax.cond(visible_IJ[i, j], visit, lambda _, seen: seen, j, seen)

        zero = jnp.zeros((batch, kv, group, size), jnp.float32)
        start = (zero + LOWEST, zero, jnp.zeros((*zero.shape, width), jnp.float32))
        # The own block comes last and shows something: what a hidden one left is scaled to nothing.
        highest, total, out = jax.lax.fori_loop(0, i + 1, step, start)
        return out / total[..., None], highest + jnp.log(total)

    out, lse = jax.lax.map(queries, jnp.arange(length // size))
    out_BKGLF = jnp.moveaxis(out, 0, 3).reshape(batch, kv, group, length, width)
    out_BLKGF = jnp.transpose(out_BKGLF, (0, 3, 1, 2, 4)).astype(q_BLKGF.dtype)
    lse_BKGL = jnp.moveaxis(lse, 0, 3).reshape(batch, kv, group, length)
    return out_BLKGF, _Kept(q_BLKGF, k_BLKF, v_BLKF, mask_BLL, out_BLKGF, lse_BKGL)


def _backward(size: int, kept: _Kept, dout_BLKGF: Array) -> tuple[Array, Array, Array, None]:
    q_BLKGF, k_BLKF, v_BLKF, mask_BLL, out_BLKGF, lse_BKGL = kept
    count, scale = q_BLKGF.shape[1] // size, jnp.float32(q_BLKGF.shape[-1] ** -0.5)
    visible_IJ = _visible(mask_BLL, size)
    along_BKGL = product("blkgf,blkgf->bkgl", dout_BLKGF, out_BLKGF)

    def keys(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, v = _part(k_BLKF, j, size), _part(v_BLKF, j, size)

        def visit(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_BLKGF, dk, dv = sums
            q, dout = _part(q_BLKGF, i, size), _part(dout_BLKGF, i, size)
            lse, along = (_part(x, i, size, 3)[..., None] for x in (lse_BKGL, along_BKGL))
            probs = jnp.exp(_scores(q, k, mask_BLL, i, j) - lse)
            dv = dv + product("bkgls,blkgf->bskf", probs.astype(dout.dtype), dout)
            dprobs = product("blkgf,bskf->bkgls", dout, v)
            dscores = (probs * (dprobs - along) * scale).astype(q.dtype)
            dk = dk + product("bkgls,blkgf->bskf", dscores, q)
            dq = _part(dq_BLKGF, i, size) + product("bkgls,bskf->blkgf", dscores, k)
            return jax.lax.dynamic_update_slice_in_dim(dq_BLKGF, dq, i * size, 1), dk, dv

        def step(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return jax.lax.cond(visible_IJ[i, j], visit, lambda _, sums: sums, i, sums)

        def put(x: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), j * size, 1)

        zero = jnp.zeros(k.shape, jnp.float32)
        dq_BLKGF, dk, dv = jax.lax.fori_loop(j, count, step, (sums[0], zero, zero))
        return dq_BLKGF, put(sums[1], dk), put(sums[2], dv)

    start = (jnp.zeros(q_BLKGF.shape, jnp.float32), jnp.zeros_like(k_BLKF), jnp.zeros_like(v_BLKF))
    dq_BLKGF, dk_BLKF, dv_BLKF = jax.lax.fori_loop(0, count, keys, start)
    return dq_BLKGF.astype(q_BLKGF.dtype), dk_BLKF, dv_BLKF, None


blockwise.defvjp(_forward, _backward)
