"""Grouped-query attention under an arbitrary boolean mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.blockwise import blockwise
from jax_ragrl.models.matmul import product
from jax_ragrl.models.splash import splash, splash_takes
from jax_ragrl.runtime.sharding import axis_size
from jax_ragrl.types import Tensor

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash", "blockwise")
# Below this many keys XLA's fused softmax beats cuDNN with a materialised mask.
CUDNN_FROM = 1024
AMPERE = 8.0  # the compute capability that it asks for
# Causal attention in XLA runs in this many blocks of queries, if they hold this many at least.
BLOCKS, BLOCK = 8, 32
# On a CPU it visits pairs of blocks of this many queries and keys at most.
PAIR = 64


def attention(
    q_BLHF: Array,
    k_BSKF: Array,
    v_BSKF: Array,
    seen: Array | None,
    impl: str = "auto",
    *,
    causal: bool = False,
) -> Array:
    """`softmax(q k / sqrt(F)) v` of what is `seen`; heads `H` share `K` key-value heads in order.

    The softmax is float32; the result `[B, L, H, F]` has the dtype of `q`. `seen` is a mask, bool
    `[B, L, S]`, under which every query sees at least one key. `causal` promises that L is S and
    that it hides every later key: what is not computed then is not looked at. Without a mask
    nothing else is hidden, and cuDNN reads no bias. Where it `reads_places`, `seen` is no mask but
    up to where each key is seen, int32 `[B, L]`.

    `impl` is `xla`, `cudnn`, `splash` or `blockwise` (both causal only), or `auto`: cuDNN where it
    exists and fits, `splash` on a TPU, `blockwise` on a CPU, else `xla`. What `auto` takes is what
    the default backend wants: name one to compile ahead of time for another.
    """
    no_mask = causal and (seen is None or seen.ndim == 2)
    if no_mask and reads_places(impl, q_BLHF.shape[1], k_BSKF.shape[2]):
        return splash(q_BLHF, k_BSKF, v_BSKF, seen)
    if impl == "cudnn" or (impl == "auto" and _on_cuda() and cudnn_takes(q_BLHF, k_BSKF)):
        mask_B1LS = None if seen is None else seen[:, None]
        return jax.nn.dot_product_attention(
            q_BLHF, k_BSKF, v_BSKF, mask=mask_B1LS, is_causal=causal, implementation="cudnn"
        )
    mask_BLS = earlier(q_BLHF.shape[1]) if seen is None else seen
    size = _pair(q_BLHF.shape[1])
    on_cpu = impl == "auto" and jax.default_backend() == "cpu"
    if causal and size and (on_cpu or impl == "blockwise"):
        q_BLKGF = q_BLHF.reshape(*q_BLHF.shape[:2], k_BSKF.shape[2], -1, q_BLHF.shape[3])
        return blockwise(q_BLKGF, k_BSKF, v_BSKF, mask_BLS, size).reshape(q_BLHF.shape)
    if causal:
        return _in_blocks(q_BLHF, k_BSKF, v_BSKF, mask_BLS)
    return _grouped(q_BLHF, k_BSKF, v_BSKF, mask_BLS)


Pair = tuple[Array, Array]  # keys and values


def shared_attention(q_BLHF: Array, before: Pair, own: Pair, mask_BLS: Array) -> Array:
    """`attention` of rows that begin alike, over keys `[P, K, S', F]` that come before B / P
    adjacent rows each, and then keys `[B, K, S'', F]` of their own; S is S' + S''.

    What rows share is read once, and all their queries are one product with it (Juravsky et al.
    2024, Hydragen, arXiv 2402.05099). The two parts meet in their sums alone: scores stay where
    their product has put them.
    """
    batch, length, heads, width = q_BLHF.shape
    prompts, kv, shared = before[0].shape[:3]
    apart = prompts, batch // prompts
    q_PWLKGF = q_BLHF.reshape(*apart, length, kv, heads // kv, width)
    k_PWKSF, v_PWKSF = (x.reshape(*apart, *x.shape[1:]) for x in own)
    mask_PWLS = mask_BLS.reshape(*apart, length, -1)
    first = product("pwlkgf,pksf->pkwlgs", q_PWLKGF, before[0])
    first = _masked(first, mask_PWLS[:, None, :, :, None, :shared], width)
    if q_PWLKGF.shape[1] == 1:
        # Both products would have equal shapes, and XLA would merge them into one: its pass for
        # GPUs first copies both keys into one array, with every token that is sampled.
        q_PWLKGF = jax.lax.optimization_barrier(q_PWLKGF)
    last = product("pwlkgf,pwksf->pwklgs", q_PWLKGF, k_PWKSF)
    last = _masked(last, mask_PWLS[:, :, None, :, None, shared:], width)
    top = jnp.maximum(_by_row(jnp.max(first, -1)), jnp.max(last, -1))  # of both, [P, W, K, L, G]
    first, last = jnp.exp(first - _by_row(top)[..., None]), jnp.exp(last - top[..., None])
    total = _by_row(jnp.sum(first, -1)) + jnp.sum(last, -1)
    first, last = (x.astype(v_PWKSF.dtype) for x in (first, last))
    out = _by_row(product("pkwlgs,pksf->pkwlgf", first, before[1]))
    out = out + product("pwklgs,pwksf->pwklgf", last, v_PWKSF)
    out = (out / total[..., None]).astype(q_BLHF.dtype)
    return jnp.swapaxes(out, 2, 3).reshape(q_BLHF.shape)


def _by_row(x: Array) -> Array:
    """From `[P, K, W, ...]` to `[P, W, K, ...]`, or back."""
    return jnp.swapaxes(x, 1, 2)


def earlier(length: int) -> Array:
    """The mask of plain causal attention, bool `[1, L, L]`: each sees itself and all before it."""
    return jnp.tril(jnp.ones((length, length), bool))[None]


def prefix_mask(until_BL: Array) -> Array:
    """The mask of keys that are seen from their own place up to another, bool `[B, L, L]`."""
    at_L = jnp.arange(until_BL.shape[1], dtype=until_BL.dtype)
    query_1L1, key_11L = at_L[None, :, None], at_L[None, None, :]
    return (key_11L <= query_1L1) & (query_1L1 < until_BL[:, None, :])


def reads_places(impl: str, length: int, kv_heads: int) -> bool:
    """Whether causal attention of such rows is told up to where each key is seen, and no mask."""
    on_tpu = impl == "auto" and jax.default_backend() == "tpu"
    return (on_tpu or impl == "splash") and splash_takes(length, kv_heads)


def _pair(length: int) -> int:
    """The side of a pair of blocks; 0 for a length that does not divide into any."""
    return next((n for n in range(min(PAIR, length - 1), BLOCK - 1, -1) if length % n == 0), 0)


def _in_blocks(q_BLHF: Array, k_BSKF: Array, v_BSKF: Array, mask_BLS: Array) -> Array:
    """Each block of queries against the keys up to its end: about half of all pairs, and of the
    scores only one block's at a time, for the backward pass computes them again."""
    length = q_BLHF.shape[1]
    count = next(n for n in range(BLOCKS, 0, -1) if n == 1 or length % (n * BLOCK) == 0)
    ends = [length * (i + 1) // count for i in range(count)]
    one = jax.checkpoint(_grouped) if count > 1 else _grouped
    parts = [
        one(q_BLHF[:, start:end], k_BSKF[:, :end], v_BSKF[:, :end], mask_BLS[:, start:end, :end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return jnp.concatenate(parts, axis=1)


def cudnn_takes(q_BLHF: Tensor, k_BSKF: Tensor) -> bool:
    """What cuDNN takes with a mask, in training too, and does faster: half precision, even lengths,
    many keys, narrow heads; on a mesh, key-value heads that the tensor axis splits as it splits the
    queries' (see `Rules`)."""
    length, keys, head_dim = q_BLHF.shape[1], k_BSKF.shape[1], q_BLHF.shape[-1]
    half = q_BLHF.dtype in (jnp.bfloat16, jnp.float16)
    fits = length % 2 == 0 and keys % 2 == 0 and head_dim % 8 == 0 and head_dim <= 128
    fits = fits and k_BSKF.shape[2] % axis_size("tensor") == 0
    return half and fits and keys >= CUDNN_FROM


def _on_cuda() -> bool:
    """Whether the default devices are NVIDIA GPUs that cuDNN's attention has kernels for."""
    if jax.default_backend() != "gpu":
        return False
    gpu = jax.local_devices(backend="gpu")[0]
    return "cuda" in gpu.client.platform_version and float(gpu.compute_capability) >= AMPERE


def _grouped(q_BLHF: Array, k_BSKF: Array, v_BSKF: Array, mask_BLS: Array) -> Array:
    batch, length, heads, head_dim = q_BLHF.shape
    kv_heads = k_BSKF.shape[2]
    q_BLKGF = q_BLHF.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = product("blkgf,bskf->bkgls", q_BLKGF, k_BSKF)
    scores = _masked(scores, mask_BLS[:, None, None], head_dim)
    probs = jax.nn.softmax(scores, axis=-1).astype(v_BSKF.dtype)
    out = product("bkgls,bskf->blkgf", probs, v_BSKF)
    return out.astype(q_BLHF.dtype).reshape(batch, length, heads, head_dim)


def _masked(scores: Array, mask: Array, head_dim: int) -> Array:
    # The lowest finite number: a query that sees nothing gets an average instead of a nan.
    return jnp.where(mask, scores * jnp.float32(head_dim**-0.5), jnp.finfo(jnp.float32).min)
