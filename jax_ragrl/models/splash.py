"""Causal attention on a TPU by JAX's splash kernel, whose scores never leave the chip.

The kernel skips blocks of queries and keys that are entirely masked, which is most of a row that
holds a prefix tree or many contexts, and reads no mask for blocks that are entirely visible. A
kernel runs on one device: on a mesh each device runs it on its own rows and heads.

A mask is given as places: key j is visible to queries from place j up to `until_BL[:, j]`,
exclusive. `_mask_info` converts places to the tables that the kernel reads:

  1. `block_kinds`: for each pair of blocks, masked (0), partly visible (1) or visible (2).
  2. `data_next`, `mask_next`: which block of keys and which mask to load next; repeating the
     previous number loads nothing.
  3. `_partial_masks`: the masks of the pairs on or below the diagonal.

The kernel reads masks as 32-bit integers, 8.7 GB for a row of 65,536 tokens. Such a row attends in
chunks of queries, one after the other, each with its own masks.
"""

from __future__ import annotations

import functools
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

from jax_ragrl.runtime.sharding import LogicalAxes, axis_size, on_each_device

# Sides of a block, of which the largest that divides a row is used; the kernel takes multiples of
# 128.
BLOCK_SIDES = (512, 256, 128)
# Bytes of the masks that exist at a time.
MASK_BYTES = 2**30
# Below this number of keys XLA's scores are small, and its fused softmax has no loop over blocks.
SPLASH_MIN_KEYS = 1024


def splash_supports(length: int, kv_heads: int) -> bool:
    """Returns whether the kernel takes rows of a length, and is faster than XLA for them.

    The length must divide into blocks. On a mesh the tensor axis must split the key-value heads as
    it splits the query heads (see `Rules`).
    """
    divides = length % BLOCK_SIDES[-1] == 0 and kv_heads % axis_size("tensor") == 0
    return length >= SPLASH_MIN_KEYS and divides


def splash(q_BLHF: Array, k_BLKF: Array, v_BLKF: Array, until_BL: Array | None) -> Array:
    """Returns `softmax(q k / sqrt(F)) v` under a causal mask.

    Args:
      q_BLHF: queries; L divides into blocks, see `splash_supports`.
      k_BLKF: keys.
      v_BLKF: values.
      until_BL: int32, the place up to which each key is visible, exclusive; at least the place
        after the key. None: to all later queries.

    Returns:
      An array of the shape and dtype of `q_BLHF`; scores and sums are float32.
    """
    places = () if until_BL is None else (until_BL,)
    arrays = (q_BLHF, k_BLKF, v_BLKF, *places)
    # Each device of the mesh has its own rows and heads.
    names: list[LogicalAxes] = [("batch", None, heads, None) for heads in ("heads", "kv", "kv")]
    out: Array = on_each_device(_on_device, arrays, [*names, ("batch", None)][: len(arrays)])
    return out


def _on_device(q_BLHF: Array, k_BLKF: Array, v_BLKF: Array, until_BL: Array | None = None) -> Array:
    """Runs the kernel, which has heads but no batch axis: the heads of all rows are its heads."""
    batch, length, heads, width = q_BLHF.shape
    scaled_q = (q_BLHF.astype(jnp.float32) * jnp.float32(width**-0.5)).astype(q_BLHF.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2).reshape(-1, length, width) for x in (scaled_q, k_BLKF, v_BLKF))
    if until_BL is None:
        out = _causal_kernel(batch * heads, length, length)(q, k, v)
    else:
        out = _tree_attention(q, k, v, until_BL)
    return jnp.swapaxes(out.reshape(batch, heads, length, width), 1, 2)


def _tree_attention(q_NLF: Array, k_MLF: Array, v_MLF: Array, until_BL: Array) -> Array:
    """Runs the kernel with places, in chunks of queries if its masks are too large."""
    batch, length = until_BL.shape
    heads, chunk = q_NLF.shape[0] // batch, _queries_at_a_time(batch, length)
    starts_I = jnp.arange(0, chunk, _side(length), dtype=jnp.int32)
    if chunk == length:
        return _tree_kernel(until_BL, heads, starts_I)(q_NLF, k_MLF, v_MLF)

    # The backward pass makes the masks again, and keeps the outputs of the kernel.
    @functools.partial(jax.checkpoint, policy=lambda x, *_, **__: x.name == "pallas_call")
    def attend(_: None, first: Array) -> tuple[None, Array]:
        q_NCF = jax.lax.dynamic_slice_in_dim(q_NLF, first, chunk, axis=1)
        return None, _tree_kernel(until_BL, heads, first + starts_I)(q_NCF, k_MLF, v_MLF)

    _, out = jax.lax.scan(attend, None, jnp.arange(0, length, chunk, dtype=jnp.int32))
    return jnp.swapaxes(out, 0, 1).reshape(q_NLF.shape)


def _queries_at_a_time(batch: int, length: int) -> int:
    """Returns the number of queries whose masks fit into `MASK_BYTES`; it divides the length."""
    # The masks of a whole row are those on or below the diagonal, half of all.
    if 2 * batch * length**2 <= MASK_BYTES:
        return length
    side = _side(length)
    blocks = length // side
    most = max(1, MASK_BYTES // (4 * batch * length * side))
    return side * next(n for n in range(min(most, blocks), 0, -1) if blocks % n == 0)


def _causal_kernel(heads: int, queries: int, keys: int) -> Any:
    """Returns the kernel of plain causal attention."""
    side = _side(keys)
    sizes = BlockSizes(side, side, side, side, side, side, side, side)  # of its three passes
    mask = MultiHeadMask([CausalMask((queries, keys))] * heads)
    return make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def _side(length: int) -> int:
    return next(side for side in BLOCK_SIDES if length % side == 0)


def _tree_kernel(until_BL: Array, heads: int, starts_I: Array) -> Any:
    """Returns the kernel of rows with limited ranges of visibility.

    Args:
      until_BL: the places up to which keys are visible.
      heads: heads per row.
      starts_I: the place of the first query of each block.
    """
    # JAX makes kernels from masks that are known at compile time. Here the mask is data: take a
    # causal kernel and exchange its tables.
    length = until_BL.shape[1]
    kernel = _causal_kernel(1, len(starts_I) * _side(length), length)
    forward, backward = (_mask_info(until_BL, heads, by_key, starts_I) for by_key in (False, True))
    kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info = forward, forward, backward
    kernel.kwargs["mask_function"] = None
    return kernel


def _mask_info(
    until_BL: Array, heads: int, by_key: bool, starts_I: Array | None = None
) -> MaskInfo:
    """Returns the kernel's tables over pairs of a block of queries `I` and a block of keys `J`.

    The kernel holds one block of queries and visits the blocks of keys; with `by_key` it is the
    other way round. For each pair its tables say whether the pair is masked, partly visible or
    visible, which block to load and which mask. A pair without a load repeats the number before
    it, so nothing is loaded again.

    Args:
      until_BL: the places up to which keys are visible.
      heads: heads per row.
      by_key: see above.
      starts_I: the place of the first query of each block; None: the blocks of all queries.
    """
    batch, side = until_BL.shape[0], _side(until_BL.shape[1])
    until_BJK = until_BL.reshape(batch, -1, side)
    key_blocks = until_BJK.shape[1]
    if starts_I is None:
        starts_I = jnp.arange(0, key_blocks * side, side)
    query_blocks = len(starts_I)
    # 1. The kind of each pair.
    kind_BIJ = block_kinds(until_BJK, starts_I)
    # 2. Numbers of the visited block and of the mask of each pair. With all queries, no pair above
    # the diagonal needs a mask.
    block_1IJ = np.indices((1, query_blocks, key_blocks), np.int32)[1 if by_key else 2]
    needed_IJ = np.ones((query_blocks, key_blocks), bool)
    needed_IJ = np.tril(needed_IJ) if query_blocks == key_blocks else needed_IJ
    pairs = np.asarray(np.nonzero(needed_IJ), np.int32)
    number_BIJ = np.zeros((batch, query_blocks, key_blocks), np.int32)
    number_BIJ[:, *pairs] = np.arange(batch * pairs.shape[1]).reshape(batch, -1)

    def repeat_last_needed(needed_BIJ: Array, number_BIJ: np.ndarray) -> Array:
        # Numbers ascend along the visited axis, so a running maximum repeats the last needed one.
        last_BIJ = jax.lax.cummax(jnp.where(needed_BIJ, number_BIJ, 0), 1 if by_key else 2)
        # The kernel keeps the tables in scarce scalar memory: take the smallest signed dtype.
        return per_head(last_BIJ.astype(np.min_scalar_type(-int(number_BIJ.max()) - 1)))

    def per_head(x_BIJ: Array) -> Array:
        # A single table is shared by all heads of the kernel; several rows need one per head.
        return jnp.repeat(x_BIJ, heads if batch > 1 else 1, axis=0)

    # 3. The tables.
    return MaskInfo(
        data_next=repeat_last_needed(kind_BIJ > 0, block_1IJ),
        mask_next=repeat_last_needed(kind_BIJ == 1, number_BIJ),
        block_mask=per_head(kind_BIJ.astype(jnp.int8)),
        partial_mask_blocks=_partial_masks(until_BJK, starts_I, pairs, by_key),
        q_sequence=None,
        is_dynamic_mask=True,
    )


def block_kinds(until_BJK: Array, starts_I: Array) -> Array:
    """Returns, int32 `[B, I, J]`, whether a pair is masked (0), partly visible (1), visible (2).

    A pair below the diagonal is visible if all its keys are visible beyond the last query, and
    partly visible if any key is visible to the first query. A pair on the diagonal is partly
    visible, above it masked.
    """
    _, count, side = until_BJK.shape
    first_1I1, keys_11J = starts_I[None, :, None], jnp.arange(0, count * side, side)[None, None]
    below_1IJ, same_1IJ = keys_11J < first_1I1, keys_11J == first_1I1
    some_BIJ = (jnp.max(until_BJK, axis=2)[:, None] > first_1I1) & below_1IJ
    all_BIJ = (jnp.min(until_BJK, axis=2)[:, None] >= first_1I1 + side) & below_1IJ
    return jnp.where(all_BIJ, 2, jnp.where(some_BIJ | same_1IJ, 1, 0))


def _partial_masks(until_BJK: Array, starts_I: Array, pairs: np.ndarray, by_key: bool) -> Array:
    """Returns the mask of each pair, bool `[B * pairs, queries, keys]`; `by_key` transposes it."""
    side, query, key = until_BJK.shape[2], *((3, 2) if by_key else (2, 3))
    within_11S = jnp.arange(side)[None, None]
    at_query = starts_I[pairs[0]][None, :, None] + within_11S
    at_key = pairs[1][None, :, None] * side + within_11S
    at_query, at_key = jnp.expand_dims(at_query, key), jnp.expand_dims(at_key, query)
    until = jnp.expand_dims(until_BJK[:, pairs[1]], query)
    return ((at_key <= at_query) & (at_query < until)).reshape(-1, side, side)
