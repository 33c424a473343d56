"""One decoder layer: attention and a gated MLP, each added to the residual stream.

Activations are in the compute dtype; norms, rotations and softmax are float32 inside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.attention import KeysValues, attention, lower_triangular_mask
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.matmul import matmul
from jax_ragrl.models.prefix_attention import VisibleKeys, prefix_attention
from jax_ragrl.models.rope import apply_rope
from jax_ragrl.models.saveable import PRODUCT, saveable
from jax_ragrl.runtime.sharding import axis_size, constrain


class LayerCall(NamedTuple):
    """The inputs that all layers of one forward pass share.

    Fields:
      adapter_scale: the factor `alpha / rank` of a low-rank adapter; unused without one.
      rope: cosine and sine of the rotary embedding, float32 `[B, L, F / 2]`, see `rope_tables`.
      visibility: which keys each query attends to. One of
        None: itself and all earlier tokens (without a cache only);
        a bool mask `[B, L, S]`: the pairs that are True;
        `VisibleKeys`: the first keys of prefix and cache (only if `uses_decode_kernel`).
      window_mask: bool `[B, L, S]`, True for keys within the sliding window, which the sliding
        layers add to the mask; None if no layer slides.
      write_B: int32, the cache slot of the first new token of each row; None without a cache.
    """

    config: DecoderConfig
    adapter_scale: float
    rope: tuple[Array, Array]
    visibility: Array | VisibleKeys | None
    window_mask: Array | None
    write_B: Array | None


def decoder_layer(
    call: LayerCall,
    x_BLD: Array,
    p: dict[str, Array],
    is_sliding: Array,
    cache: tuple[KeysValues, KeysValues] | None = None,
) -> tuple[Array, KeysValues]:
    """Runs one layer on the residual stream, in the compute dtype.

    Args:
      p: the arrays of this layer by name (`layer_weights`), including the arrays of its adapter.
      is_sliding: bool scalar, whether this layer attends within the sliding window only.
      cache: keys and values `[P, K, S', F]` of prefixes, each of B / P adjacent rows, and those
        that come after them, `[B, K, S, F]`, to update; None: attention within the row.

    Returns:
      The new residual stream, and keys and values: the updated cache `[B, K, S, F]`, or without a
      cache the new ones `[B, L, K, F]`.
    """
    eps = call.config.rms_norm_eps
    # 1.-3. Norm, projections, rotation.
    q_BLHF, k_BLKF, v_BLKF = _qkv(call, rms_norm(x_BLD, p["attn_norm"], eps), p)
    visibility = call.visibility
    if call.window_mask is not None and not isinstance(visibility, VisibleKeys):
        mask = lower_triangular_mask(x_BLD.shape[1]) if visibility is None else visibility
        visibility = mask & (call.window_mask | ~is_sliding)
    # 4. Cache. 5. Attend.
    new_kv = k_BLKF, v_BLKF
    if cache is None:
        assert not isinstance(visibility, VisibleKeys), "the counts are of a cache"
        out_BLHF = attention(q_BLHF, *new_kv, visibility, call.config.attention_impl)
    else:
        assert visibility is not None and call.write_B is not None, "checked by the decoder"
        prefix_kv, (k_BKSF, v_BKSF) = cache
        new_kv = (
            write_cache(k_BKSF, k_BLKF, call.write_B),
            write_cache(v_BKSF, v_BLKF, call.write_B),
        )
        out_BLHF = prefix_attention(q_BLHF, prefix_kv, new_kv, visibility)
    # 6. Project.
    x_BLD = x_BLD + linear(out_BLHF, "o_proj", p, call.adapter_scale, inputs=2)
    # 7. MLP.
    x_BLD = x_BLD + _mlp(call, rms_norm(x_BLD, p["mlp_norm"], eps), p)
    return constrain(x_BLD, ("batch", "length", None)), new_kv


def fuse_projections(p: dict[str, Any]) -> dict[str, Any]:
    """Fuses projections that share an input (q/k/v, gate/up) into single matmuls.

    Query heads are stacked next to the key-value head that they share, so a tensor axis that splits
    key-value heads splits the fused array in the same way. If it does not split these, q, k and v
    stay separate; int8 weights are returned unchanged, because their scales are separate arrays.
    """
    layer = dict(p)
    if hasattr(p["q_proj"], "qvalue"):
        return layer
    layer["gate_up_proj"] = jnp.stack([layer.pop("gate_proj"), layer.pop("up_proj")], axis=1)
    width, kv, head_dim = p["k_proj"].shape
    if kv % axis_size("tensor") == 0:
        q, k, v = (layer.pop(f"{n}_proj").reshape(width, kv, -1, head_dim) for n in "qkv")
        layer["qkv_proj"] = jnp.concatenate([q, k, v], axis=2)
    return layer


def _qkv(call: LayerCall, x_BLD: Array, p: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Returns rotated queries `[B, L, H, F]` and keys, and values `[B, L, K, F]`."""
    c = call.config
    # 1. Matmuls. J indexes the query heads of a key-value head, then its key and its value.
    if "qkv_proj" in p:
        all_BLKJF = _matmul(x_BLD, p["qkv_proj"])
        q, k, v = all_BLKJF[..., :-2, :], all_BLKJF[..., -2, :], all_BLKJF[..., -1, :]
        q = q.reshape(*q.shape[:2], c.num_heads, c.head_dim)
    else:
        q, k, v = (_matmul(x_BLD, p[f"{n}_proj"]) for n in "qkv")
    # 2. Adapters, which are never fused, and biases (Qwen2).
    q, k, v = (
        _add_adapter(y, x_BLD, f"{n}_proj", p, call.adapter_scale)
        for n, y in zip("qkv", (q, k, v), strict=True)
    )
    if c.qkv_bias:
        # In float32: the backward pass of the sum adds up the cotangents of all tokens, which
        # bfloat16 would round away.
        biases = (_expand_like(p[f"{n}_bias"], q).astype(jnp.float32) for n in "qkv")
        q, k, v = (
            (x.astype(jnp.float32) + bias).astype(x.dtype)
            for x, bias in zip((q, k, v), biases, strict=True)
        )
    # 3. Norms per head (Qwen3), then the rotation.
    if c.qk_norm:
        q, k = rms_norm(q, p["q_norm"], c.rms_norm_eps), rms_norm(k, p["k_norm"], c.rms_norm_eps)
    return apply_rope(q, call.rope), apply_rope(k, call.rope), v


def _mlp(call: LayerCall, x_BLD: Array, p: dict[str, Array]) -> Array:
    """SwiGLU, Shazeer 2020 (arXiv 2002.05202): `(silu(x W_gate) * (x W_up)) W_down`."""
    scale = call.adapter_scale
    if "gate_up_proj" in p:
        both = _matmul(x_BLD, p["gate_up_proj"])
        gate, up = both[..., 0, :], both[..., 1, :]
    else:
        gate, up = (_matmul(x_BLD, p[name]) for name in ("gate_proj", "up_proj"))
    gate = _add_adapter(gate, x_BLD, "gate_proj", p, scale)
    up = _add_adapter(up, x_BLD, "up_proj", p, scale)
    return linear(jax.nn.silu(gate) * up, "down_proj", p, scale)


def linear(x: Array, name: str, p: dict[str, Array], scale: float, inputs: int = 1) -> Array:
    """Returns `x W + scale (x A) B`, or `x W` if the projection has no adapter.

    The last `inputs` axes of `x` are contracted with the arrays `name` of the layer's `p`.
    """
    return _add_adapter(_matmul(x, p[name], inputs), x, name, p, scale, inputs)


def _matmul(x: Array, kernel: Any, inputs: int = 1) -> Array:
    if hasattr(kernel, "qvalue"):  # quantized weights, see `models/int8.py`
        cast = kernel.qvalue.astype(x.dtype) * kernel.scale.astype(x.dtype)
    else:
        cast = kernel.astype(x.dtype)
    return matmul(x, cast, inputs)


def _add_adapter(
    y: Array, x: Array, name: str, p: dict[str, Array], scale: float, inputs: int = 1
) -> Array:
    """Adds the term of a projection's adapter to its output `y`, if it has an adapter."""
    if f"{name}_lora_a" in p:
        low = matmul(x, p[f"{name}_lora_a"].astype(x.dtype), inputs)
        y = y + jnp.asarray(scale, x.dtype) * matmul(low, p[f"{name}_lora_b"].astype(x.dtype))
    return saveable(y, PRODUCT)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """Returns `x / sqrt(mean(x^2) + eps) * gain` over the last axis.

    Float32 inside, the dtype of `x` outside. Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * _expand_like(gain, wide)).astype(x.dtype)


def _expand_like(vector: Array, like: Array) -> Array:
    """Casts to the dtype of `like` and adds leading axes: silent rank promotion is forbidden."""
    return jnp.expand_dims(vector.astype(like.dtype), tuple(range(like.ndim - vector.ndim)))


def write_cache(cache_BKSF: Array, new_BLKF: Array, write_B: Array) -> Array:
    """Writes the new entries of each row from its offset on; entries past the end are dropped."""
    slots_BL1 = (write_B[:, None] + jnp.arange(new_BLKF.shape[1])[None, :])[..., None]
    # Rows are a batch dimension of the scatter, not indices: on a mesh each device then writes its
    # own rows. As indices, cache and new entries would be gathered for every token.
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    new_BLKF = new_BLKF.astype(cache_BKSF.dtype)
    return jax.lax.scatter(cache_BKSF, slots_BL1, new_BLKF, numbers, mode="drop")
