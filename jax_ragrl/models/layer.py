"""One layer: attention and a gated MLP, each on a normed residual stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.attention import Pair, attention, earlier, shared_attention
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.rope import apply_rope
from jax_ragrl.runtime.sharding import axis_size, constrain


class LayerCall(NamedTuple):
    """What every layer of one forward shares. `near` is the window mask, `None` without one."""

    config: DecoderConfig
    adapter_scale: float
    rope: tuple[Array, Array]
    seen: Array | None
    near: Array | None
    write: Array | None


def one_layer(
    call: LayerCall,
    x_BLD: Array,
    p: dict[str, Array],
    slides: Array,
    cache: Pair | None = None,
    before: Pair | None = None,
) -> tuple[Array, Pair]:
    """One layer, and its keys and values: with a cache all of that, `[B, K, S, F]`, else the new
    ones, `[B, L, K, F]`."""
    eps = call.config.rms_norm_eps
    q_BLHF, k_BLKF, v_BLKF = _qkv(call, rms_norm(x_BLD, p["attn_norm"], eps), p)
    kept = k_BLKF, v_BLKF
    if cache is not None and call.write is not None:
        kept = _write(cache[0], k_BLKF, call.write), _write(cache[1], v_BLKF, call.write)
    seen = call.seen
    if call.near is not None:
        seen = earlier(x_BLD.shape[1]) if seen is None else seen
        seen = seen & (call.near | ~slides)
    if before is not None and seen is not None:
        out_BLHF = shared_attention(q_BLHF, before, kept, seen)
    else:
        k_BSKF, v_BSKF = kept if cache is None else (jnp.swapaxes(x, 1, 2) for x in kept)
        impl, causal = call.config.attention_impl, cache is None
        out_BLHF = attention(q_BLHF, k_BSKF, v_BSKF, seen, impl, causal=causal)
    x_BLD = x_BLD + linear(out_BLHF, "o_proj", p, call.adapter_scale, inputs=2)
    x_BLD = x_BLD + _mlp(call, rms_norm(x_BLD, p["mlp_norm"], eps), p)
    return constrain(x_BLD, ("batch", "length", None)), kept


def joined(p: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a layer, with those in one that multiply the same.

    Heads go with the key-value head that they share, and the tensor axis of a mesh splits what it
    split before; where it splits heads but not these, or weights are int8, they stay apart.
    """
    apart = dict(p)
    if hasattr(p["q_proj"], "qvalue"):
        return apart
    apart["gate_up_proj"] = jnp.stack([apart.pop("gate_proj"), apart.pop("up_proj")], axis=1)
    width, kv, head_dim = p["k_proj"].shape
    if kv % axis_size("tensor") == 0:
        q, k, v = (apart.pop(f"{n}_proj").reshape(width, kv, -1, head_dim) for n in "qkv")
        apart["qkv_proj"] = jnp.concatenate([q, k, v], axis=2)
    return apart


def _qkv(call: LayerCall, x_BLD: Array, p: dict[str, Array]) -> tuple[Array, Array, Array]:
    c = call.config
    if "qkv_proj" in p:
        all_BLKJF = _product(x_BLD, p["qkv_proj"])
        q, k, v = all_BLKJF[..., :-2, :], all_BLKJF[..., -2, :], all_BLKJF[..., -1, :]
        q = q.reshape(*q.shape[:2], c.num_heads, c.head_dim)
    else:
        q, k, v = (_product(x_BLD, p[f"{n}_proj"]) for n in "qkv")
    q, k, v = (
        _adapted(y, x_BLD, f"{n}_proj", p, call.adapter_scale)
        for n, y in zip("qkv", (q, k, v), strict=True)
    )
    if c.qkv_bias:
        q, k, v = (_biased(x, p[f"{n}_bias"]) for n, x in zip("qkv", (q, k, v), strict=True))
    if c.qk_norm:
        q, k = rms_norm(q, p["q_norm"], c.rms_norm_eps), rms_norm(k, p["k_norm"], c.rms_norm_eps)
    return apply_rope(q, call.rope), apply_rope(k, call.rope), v


def _biased(x: Array, bias: Array) -> Array:
    """`x + bias`, of the dtype of `x`; added in float32, where the bias's gradient then sums the
    cotangents of all tokens."""
    wide = _row(bias.astype(x.dtype), x).astype(jnp.float32)
    return (x.astype(jnp.float32) + wide).astype(x.dtype)


def _mlp(call: LayerCall, x_BLD: Array, p: dict[str, Array]) -> Array:
    """SwiGLU, Shazeer 2020 (arXiv 2002.05202)."""
    scale = call.adapter_scale
    if "gate_up_proj" in p:
        both = _product(x_BLD, p["gate_up_proj"])
        gate, up = both[..., 0, :], both[..., 1, :]
    else:
        gate, up = (_product(x_BLD, p[name]) for name in ("gate_proj", "up_proj"))
    gate = _adapted(gate, x_BLD, "gate_proj", p, scale)
    up = _adapted(up, x_BLD, "up_proj", p, scale)
    return linear(jax.nn.silu(gate) * up, "down_proj", p, scale)


def linear(x: Array, name: str, p: dict[str, Array], scale: float, inputs: int = 1) -> Array:
    """`x W + scale (x A) B`, contracting the last `inputs` axes of `x`; no adapter, no term."""
    return _adapted(_product(x, p[name], inputs), x, name, p, scale, inputs)


def _product(x: Array, kernel: Any, inputs: int = 1) -> Array:
    return jnp.tensordot(x, _widened(kernel, x.dtype), axes=inputs)


def _adapted(
    y: Array, x: Array, name: str, p: dict[str, Array], scale: float, inputs: int = 1
) -> Array:
    """`y` and the term of its adapter, if it has one."""
    if f"{name}_lora_a" not in p:
        return y
    low = jnp.tensordot(x, p[f"{name}_lora_a"].astype(x.dtype), axes=inputs)
    delta = jnp.tensordot(low, p[f"{name}_lora_b"].astype(x.dtype), axes=1)
    return y + jnp.asarray(scale, x.dtype) * delta


def _widened(kernel: Any, dtype: jnp.dtype) -> Array:
    """A kernel in the compute dtype, whether it is an array or quantized (`models/int8.py`)."""
    if hasattr(kernel, "qvalue"):
        return kernel.qvalue.astype(dtype) * kernel.scale.astype(dtype)
    return kernel.astype(dtype)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """`x / rms(x) * gain` over the last axis, in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * _row(gain, wide)).astype(x.dtype)


def _row(vector: Array, like: Array) -> Array:
    """`vector` in the dtype of `like`, with leading axes so that ranks agree."""
    return jnp.expand_dims(vector.astype(like.dtype), tuple(range(like.ndim - vector.ndim)))


def _write(cache_BKSF: Array, new_BLKF: Array, write_B: Array) -> Array:
    """Put each row's new entries at its offset; what falls past the end is dropped."""
    slots_BL1 = (write_B[:, None] + jnp.arange(new_BLKF.shape[1])[None, :])[..., None]
    # Rows are a batch dimension, not indices, so that on a mesh each device writes its own: as
    # indices they would be gathered with every token, and what is written too.
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    new_BLKF = new_BLKF.astype(cache_BKSF.dtype)
    return jax.lax.scatter(cache_BKSF, slots_BL1, new_BLKF, numbers, mode="drop")
