"""Causal attention on a TPU: JAX's splash kernel, whose scores never leave the chip.

It skips blocks of queries and keys in which nothing is seen, most of a row that holds a prefix tree
or many contexts, and asks no mask where all of a block is. The kernel is a program of one device:
on a mesh each runs it on its own rows and heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    make_splash_mha,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from jax_ragrl.runtime.sharding import Rules, axis_size, to_spec

# Sides of a block, the largest that divides a row; the kernel takes multiples of 128.
SIDES = (512, 256, 128)
# Below this many keys the scores of XLA are small, and its fused softmax needs no loop of blocks.
SPLASH_FROM = 1024


def splash_takes(length: int, kv_heads: int) -> bool:
    """What the kernel does, and does faster: many keys, a length that divides into blocks; on a
    mesh, key-value heads that the tensor axis splits as it splits the queries' (see `Rules`)."""
    whole = length % SIDES[-1] == 0 and kv_heads % axis_size("tensor") == 0
    return length >= SPLASH_FROM and whole


def splash(q_BLHF: Array, k_BLKF: Array, v_BLKF: Array, until_BL: Array | None) -> Array:
    """`softmax(q k / sqrt(F)) v`, of the shape and dtype of `q`; scores and sums are float32.

    A key is seen from its own place up to `until_BL` (int32, at least the place after it), by all
    that come after it where that is None. L divides into blocks, see `splash_takes`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arrays = [q_BLHF, k_BLKF, v_BLKF, *([] if until_BL is None else [until_BL])]
    if mesh.empty or mesh.size == 1:
        return _on_device(*arrays)
    rules = Rules(uneven=("batch",))
    names = [("batch", None, heads, None) for heads in ("heads", "kv", "kv")] + [("batch", None)]
    specs = [to_spec(name, x.shape, mesh, rules) for name, x in zip(names, arrays, strict=False)]
    on_each = jax.shard_map(_on_device, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)
    return on_each(*arrays)


def _on_device(q_BLHF: Array, k_BLKF: Array, v_BLKF: Array, until_BL: Array | None = None) -> Array:
    """The kernel knows heads and no batch: here each row's are heads of their own."""
    batch, length, heads, width = q_BLHF.shape
    scaled = (q_BLHF.astype(jnp.float32) * jnp.float32(width**-0.5)).astype(q_BLHF.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2).reshape(-1, length, width) for x in (scaled, k_BLKF, v_BLKF))
    kernel = _causal(length, batch * heads) if until_BL is None else _tree(until_BL, heads)
    return jnp.swapaxes(kernel(q, k, v).reshape(batch, heads, length, width), 1, 2)


def _causal(length: int, heads: int) -> Any:
    """The kernel in which each sees itself and all before it."""
    side = _side(length)
    sizes = BlockSizes(side, side, side, side, side, side, side, side)  # of all its three passes
    mask = MultiHeadMask([CausalMask((length, length))] * heads)
    return make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def _side(length: int) -> int:
    return next(side for side in SIDES if length % side == 0)


def _tree(until_BL: Array, heads: int) -> Any:
    """The kernel of rows in which a key is seen up to a place, `heads` of each row."""
    kernel = _causal(until_BL.shape[1], 1)
    forward, backward = (_blocks(until_BL, heads, by_key) for by_key in (False, True))
    kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info = forward, forward, backward
    kernel.kwargs["mask_function"] = None
    return kernel


def _blocks(until_BL: Array, heads: int, by_key: bool) -> MaskInfo:
    """What the kernel is told of each pair of a block of queries `I` and one of keys `J`.

    For one block of queries, or of keys (`by_key`), it goes through those of the other. It asks of
    each pair whether it shows nothing, something or all (0, 1, 2), which block to have read, and
    which mask. Where it needs none both stay what they were, so that nothing is read again.
    """
    batch, side = until_BL.shape[0], _side(until_BL.shape[1])
    until_BJK = until_BL.reshape(batch, -1, side)
    count = until_BJK.shape[1]
    kind_BIJ = _kinds(until_BJK)
    block_1IJ = np.indices((1, count, count), np.int32)[1 if by_key else 2]
    pairs = np.asarray(np.tril_indices(count), np.int32)
    number_BIJ = np.zeros((batch, count, count), np.int32)
    number_BIJ[:, *pairs] = np.arange(batch * pairs.shape[1]).reshape(batch, -1)

    def kept(needed_BIJ: Array, number_BIJ: np.ndarray) -> Array:
        newest_BIJ = jax.lax.cummax(jnp.where(needed_BIJ, number_BIJ, 0), 1 if by_key else 2)
        return of_heads(newest_BIJ.astype(np.min_scalar_type(-int(number_BIJ.max()) - 1)))

    def of_heads(x_BIJ: Array) -> Array:
        return jnp.repeat(x_BIJ, heads if batch > 1 else 1, axis=0)

    return MaskInfo(
        data_next=kept(kind_BIJ > 0, block_1IJ),
        mask_next=kept(kind_BIJ == 1, number_BIJ),
        block_mask=of_heads(kind_BIJ.astype(jnp.int8)),
        partial_mask_blocks=_masks(until_BJK, pairs, by_key),
        q_sequence=None,
        is_dynamic_mask=True,
    )


def _kinds(until_BJK: Array) -> Array:
    """Whether a pair of blocks shows nothing, something or all: 0, 1, 2, int32 `[B, I, J]`."""
    _, count, side = until_BJK.shape
    first_1I1 = jnp.arange(0, count * side, side)[None, :, None]
    before_1IJ, same_1IJ = jnp.tri(count, k=-1, dtype=bool)[None], jnp.eye(count, dtype=bool)[None]
    some_BIJ = (jnp.max(until_BJK, axis=2)[:, None] > first_1I1) & before_1IJ
    all_BIJ = (jnp.min(until_BJK, axis=2)[:, None] >= first_1I1 + side) & before_1IJ
    return jnp.where(all_BIJ, 2, jnp.where(some_BIJ | same_1IJ, 1, 0))


def _masks(until_BJK: Array, pairs: np.ndarray, by_key: bool) -> Array:
    """The mask of each pair, bool `[B * pairs, queries, keys]`, or keys before queries."""
    side, query, key = until_BJK.shape[2], *((3, 2) if by_key else (2, 3))
    within_11S = jnp.arange(side)[None, None]
    at_query, at_key = (x[None, :, None] * side + within_11S for x in pairs)
    at_query, at_key = jnp.expand_dims(at_query, key), jnp.expand_dims(at_key, query)
    until = jnp.expand_dims(until_BJK[:, pairs[1]], query)
    return ((at_key <= at_query) & (at_query < until)).reshape(-1, side, side)
