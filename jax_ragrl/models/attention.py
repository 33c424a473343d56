"""Causal grouped-query attention under a boolean mask, by the fastest kernel that fits.

`attention` takes cuDNN (NVIDIA GPU, half precision, long rows), `models/blockwise.py` (CPU) or XLA
in blocks of queries, all exact. Rows that are being decoded have an attention of their own, see
`models/prefix_attention.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.blockwise import blockwise
from jax_ragrl.models.matmul import einsum_f32
from jax_ragrl.runtime.sharding import axis_size, target_platform
from jax_ragrl.types import Tensor

IMPLEMENTATIONS = ("auto", "xla")
# Below this number of keys XLA's fused softmax is faster than cuDNN with a materialized mask.
CUDNN_MIN_KEYS = 1024
MIN_COMPUTE_CAPABILITY = 8.0  # Ampere: cuDNN's attention has no kernels for older GPUs
# XLA's causal attention runs in this many blocks of queries, if each has at least this size.
QUERY_BLOCKS, MIN_QUERY_BLOCK = 8, 32
# Largest side of a block in `blockwise`, in queries or keys.
MAX_BLOCK_SIDE = 64

KeysValues = tuple[Array, Array]  # keys and values of one layer, of equal shape


def attention(
    q_BLHF: Array, k_BLKF: Array, v_BLKF: Array, mask_BLL: Array | None, impl: str = "auto"
) -> Array:
    """Returns `softmax(q k / sqrt(F)) v`, where H query heads share K key-value heads in order.

    Args:
      mask_BLL: bool, which keys each query attends to: at least one, and no later one, because the
        pairs above the diagonal are not computed. None: all keys up to the query's own place.
      impl: `auto`, which takes the kernel that suits the devices of the program, or `xla`.

    Returns:
      `[B, L, H, F]` in the dtype of `q`; the softmax is float32.
    """
    # 1. cuDNN: without a mask it reads no bias.
    if impl == "auto" and on_cuda() and cudnn_supports(q_BLHF, k_BLKF):
        mask_B1LL = None if mask_BLL is None else mask_BLL[:, None]
        return jax.nn.dot_product_attention(
            q_BLHF, k_BLKF, v_BLKF, mask=mask_B1LL, is_causal=True, implementation="cudnn"
        )
    # 2. The others need a mask.
    length = q_BLHF.shape[1]
    mask_BLL = lower_triangular_mask(length) if mask_BLL is None else mask_BLL
    # The largest side of a block that divides a row; 0 if there is none.
    sides = range(min(MAX_BLOCK_SIDE, length - 1), MIN_QUERY_BLOCK - 1, -1)
    side = next((n for n in sides if length % n == 0), 0)
    if side and impl == "auto" and target_platform() == "cpu":
        q_BLKGF = q_BLHF.reshape(*q_BLHF.shape[:2], k_BLKF.shape[2], -1, q_BLHF.shape[3])
        return blockwise(q_BLKGF, k_BLKF, v_BLKF, mask_BLL, side).reshape(q_BLHF.shape)
    # 3. XLA, block by block of queries, each to the keys up to the end of its block: this skips
    # about half of all pairs. The checkpoint keeps the scores of one block at a time: the backward
    # pass computes them again.
    counts = range(QUERY_BLOCKS, 0, -1)
    count = next(n for n in counts if n == 1 or length % (n * MIN_QUERY_BLOCK) == 0)
    ends = [length * (i + 1) // count for i in range(count)]
    attend = jax.checkpoint(dense_attention) if count > 1 else dense_attention
    parts = [
        attend(q_BLHF[:, start:end], k_BLKF[:, :end], v_BLKF[:, :end], mask_BLL[:, start:end, :end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return jnp.concatenate(parts, axis=1)


def lower_triangular_mask(length: int) -> Array:
    """Returns the mask of plain causal attention, bool `[1, L, L]`."""
    return jnp.tril(jnp.ones((length, length), bool))[None]


def visible_until_mask(until_BL: Array) -> Array:
    """Returns the mask, bool `[B, L, L]`, of keys with a limited range.

    Query i attends to key j if `j <= i < until_BL[:, j]`. In a row that holds a prefix tree in
    depth-first order this is the subtree of j.
    """
    at_L = jnp.arange(until_BL.shape[1], dtype=until_BL.dtype)
    query_1L1, key_11L = at_L[None, :, None], at_L[None, None, :]
    return (key_11L <= query_1L1) & (query_1L1 < until_BL[:, None, :])


def cudnn_supports(q_BLHF: Tensor, k_BLKF: Tensor) -> bool:
    """Returns whether cuDNN takes these arrays with a mask, in training too, and is faster.

    On a mesh the tensor axis must split the key-value heads as it splits the query heads (see
    `Rules`): its partitioner raises otherwise.
    """
    length, head_dim = q_BLHF.shape[1], q_BLHF.shape[-1]
    half = q_BLHF.dtype in (jnp.bfloat16, jnp.float16)
    fits = length % 2 == 0 and head_dim % 8 == 0 and head_dim <= 128
    fits = fits and k_BLKF.shape[2] % axis_size("tensor") == 0
    return half and fits and length >= CUDNN_MIN_KEYS


def on_cuda() -> bool:
    """Returns whether a program is for NVIDIA GPUs that the kernels of attention support."""
    if target_platform() != "gpu":
        return False
    if jax.default_backend() != "gpu":
        return True  # a described device (`runtime/topology.py`); all of them are Ampere or newer
    gpu = jax.local_devices(backend="gpu")[0]
    # The platform version of AMD GPUs names ROCm, and their capability is not a number.
    is_cuda = "cuda" in gpu.client.platform_version
    return is_cuda and float(gpu.compute_capability) >= MIN_COMPUTE_CAPABILITY


def dense_attention(q_BLHF: Array, k_BSKF: Array, v_BSKF: Array, mask_BLS: Array) -> Array:
    """Attends over all pairs at once, L queries and S keys under any mask `[B, L, S]`."""
    batch, length, heads, head_dim = q_BLHF.shape
    kv_heads = k_BSKF.shape[2]
    q_BLKGF = q_BLHF.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = einsum_f32("blkgf,bskf->bkgls", q_BLKGF, k_BSKF)
    scores = scale_and_mask(scores, mask_BLS[:, None, None], head_dim)
    probs = jax.nn.softmax(scores, axis=-1).astype(v_BSKF.dtype)
    # XLA for CPUs has no bfloat16 product for a result with few queries before the heads: it would
    # swap the operands.
    out = jnp.moveaxis(einsum_f32("bkgls,bskf->bkglf", probs, v_BSKF), 3, 1)
    return out.astype(q_BLHF.dtype).reshape(batch, length, heads, head_dim)


def scale_and_mask(scores: Array, mask: Array, head_dim: int) -> Array:
    """Divides float32 scores by the root of `head_dim`; hides the pairs that are False in `mask`.

    Hidden pairs get the lowest finite number, not minus infinity: a query without a visible key
    gets the average of all values instead of a nan.
    """
    return jnp.where(mask, scores * jnp.float32(head_dim**-0.5), jnp.finfo(jnp.float32).min)
