"""One decoder for Qwen2, Qwen2.5, Qwen3 and Llama 3: the families differ by fields of a config.

Weights are stacked over layers and the forward is a `lax.scan`, so compile time does not grow with
depth. Who sees whom is an argument: a mask, such as `causal_mask` makes for packed segments, or up
to which place each token is seen, as in the rows of prefix trees that are trained on.

Sources: Qwen2 (arXiv 2407.10671), Qwen3 (2505.09388), Llama 3 (2407.21783), as in Transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jax_ragrl.errors import UserError
from jax_ragrl.models.attention import (
    IMPLEMENTATIONS,
    Pair,
    attention,
    earlier,
    prefix_mask,
    reads_places,
    shared_attention,
)
from jax_ragrl.models.rope import RopeScaling, apply_rope, rope_tables
from jax_ragrl.models.vocabulary import copied, look_up, project, sink
from jax_ragrl.sharding import Rules, constrain, replicate, tree_shardings

KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper")  # splash and cuDNN


def _dots(primitive: Any, *given: Any, **params: Any) -> Any:
    """Products with weights, and of an attention kernel its output and one sum a query and head."""
    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return primitive.name in KERNELS or products(primitive, *given, **params)


# What a layer keeps for the backward pass.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _dots,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape and numerics; static and hashable.

    `sliding_layers` are the indices of layers limited to the last `sliding_window` positions.
    `dtype` is the compute dtype, `param_dtype` the storage dtype. `remat` says what of a layer the
    backward pass computes again: `none`, `full`, or all but the products with weights and the
    kernels of attention (`dots`).
    `scan_unroll` layers are written out in each step of the layer scan; `attention_impl` is that of
    `models/attention.py`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = True
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    max_positions: int = 32768
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    scan_unroll: int = 1
    attention_impl: str = "auto"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly: "
                "choose num_kv_heads that divides num_heads"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        if self.remat not in REMAT:
            raise UserError(f"remat is {self.remat!r}: use one of {', '.join(REMAT)}")
        if self.attention_impl not in IMPLEMENTATIONS:
            raise UserError(
                f"attention is {self.attention_impl!r}: use one of {', '.join(IMPLEMENTATIONS)}"
            )
        if self.sliding_layers and self.sliding_window is None:
            raise UserError(f"layers {self.sliding_layers} slide but sliding_window is not set")


class KVCache(NamedTuple):
    """Keys and values of each layer, `[B, kv_heads, S, head_dim]`; keys are already rotated.

    Layers are apart: a slice of one array for all of them would be copied with every token. What
    siblings begin with is in `prefix` once: row `b` comes after its row `b // (B / its batch)`.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    prefix: KVCache | None = None


class Weight(NamedTuple):
    """One parameter: its shape, its logical axes, and `fill + std * normal` to begin with."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float = 0.0
    fill: float = 0.0


# Projections back into the residual stream start smaller, so that depth does not inflate it.
RESIDUAL_SCALE = 0.4


def weights(config: DecoderConfig) -> dict:
    """Every parameter of a decoder as a nested dict of `Weight`, in a fixed order."""
    c, width = config, config.hidden_size
    tree = {
        "embed": Weight((c.vocab_size, width), ("vocab", "embed"), std=width**-0.5),
        "final_norm": Weight((width,), (None,), fill=1.0),
        "layers": {name: _stack(w, c.num_layers) for name, w in layer_weights(c).items()},
    }
    if not c.tie_embeddings:
        tree["lm_head"] = Weight((c.vocab_size, width), ("vocab", "embed"), std=width**-0.5)
    return tree


def layer_weights(config: DecoderConfig) -> dict[str, Weight]:
    """The parameters of one layer. Kernels are `[in, out]`, with heads as axes of their own."""
    c, width, mlp, head = config, config.hidden_size, config.intermediate_size, config.head_dim
    q, kv, into = (c.num_heads, head), (c.num_kv_heads, head), width**-0.5
    attn_out = RESIDUAL_SCALE * (c.num_heads * head) ** -0.5
    table = {
        "attn_norm": Weight((width,), (None,), fill=1.0),
        "q_proj": Weight((width, *q), ("embed", "heads", None), std=into),
        "k_proj": Weight((width, *kv), ("embed", "kv", None), std=into),
        "v_proj": Weight((width, *kv), ("embed", "kv", None), std=into),
        "o_proj": Weight((*q, width), ("heads", None, "embed"), std=attn_out),
        "mlp_norm": Weight((width,), (None,), fill=1.0),
        "gate_proj": Weight((width, mlp), ("embed", "mlp"), std=into),
        "up_proj": Weight((width, mlp), ("embed", "mlp"), std=into),
        "down_proj": Weight((mlp, width), ("mlp", "embed"), std=RESIDUAL_SCALE * mlp**-0.5),
    }
    if c.qkv_bias:
        table["q_bias"] = Weight(q, ("heads", None))
        table["k_bias"] = Weight(kv, ("kv", None))
        table["v_bias"] = Weight(kv, ("kv", None))
    if c.qk_norm:
        table["q_norm"] = Weight((head,), (None,), fill=1.0)
        table["k_norm"] = Weight((head,), (None,), fill=1.0)
    return table


def _stack(weight: Weight, num_layers: int) -> Weight:
    return weight._replace(shape=(num_layers, *weight.shape), axes=("layers", *weight.axes))


def _is_weight(x: object) -> bool:
    return isinstance(x, Weight)


def logical_axes(config: DecoderConfig) -> dict:
    """The logical axes of every parameter, in the tree of `weights`."""
    return jax.tree.map(lambda w: w.axes, weights(config), is_leaf=_is_weight)


def abstract_params(config: DecoderConfig) -> dict:
    """`ShapeDtypeStruct` of every parameter, in the tree of `weights`."""
    dtype = jnp.dtype(config.param_dtype)
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, dtype), weights(config), is_leaf=_is_weight
    )


def param_count(config: DecoderConfig) -> int:
    """Number of parameters; a tied head counts once."""
    flat = jax.tree.leaves(weights(config), is_leaf=_is_weight)
    return sum(math.prod(w.shape) for w in flat)


def init_params(config: DecoderConfig, key: Array) -> dict:
    """Initial parameters in the tree of `weights`; consumes `key`."""
    dtype = jnp.dtype(config.param_dtype)
    flat, treedef = jax.tree.flatten(weights(config), is_leaf=_is_weight)
    keys = jax.random.split(key, len(flat))

    def draw(weight: Weight, key: Array) -> Array:
        if weight.std == 0.0:
            return jnp.full(weight.shape, weight.fill, dtype)
        noise = jax.random.normal(key, weight.shape, jnp.float32)
        return (weight.fill + weight.std * noise).astype(dtype)

    return jax.tree.unflatten(treedef, [draw(w, keys[i]) for i, w in enumerate(flat)])


_init_params = jax.jit(init_params, static_argnums=0)


class Decoder(nnx.Module):
    """A decoder-only transformer. `nnx.split` it and jit pure functions of its state.

    Parameters: `embed [V, D]`, `final_norm [D]`, `layers` (a dict of stacked arrays, see
    `layer_weights`), and `lm_head [V, D]` where the embeddings are not tied. `adapter` is `None`
    or a low-rank adapter (`models/lora.py`).
    """

    embed: nnx.Param
    final_norm: nnx.Param
    layers: nnx.Dict
    lm_head: nnx.Param
    adapter: nnx.Dict | None

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Draws every parameter; consumes one `params` key of `rngs`."""
        self.config = config
        self.adapter_scale = 0.0
        self.adapter = nnx.data(None)
        self._adopt(_init_params(config, rngs.params()))

    def _adopt(self, params: dict) -> None:
        for name, value in params.items():
            if name == "layers":
                self.layers = nnx.Dict({k: nnx.Param(v) for k, v in value.items()})
            else:
                setattr(self, name, nnx.Param(value))

    @classmethod
    def from_params(cls, config: DecoderConfig, params: dict) -> Decoder:
        """A decoder around existing arrays in the tree of `weights`; nothing is copied."""
        decoder = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))
        decoder._adopt(params)
        return decoder

    def params(self) -> dict:
        """The arrays, in the tree of `weights` (without the adapter)."""
        return jax.tree.map(
            lambda p: p[...],
            {
                name: dict(value) if name == "layers" else value
                for name, value in ((n, getattr(self, n)) for n in weights(self.config))
            },
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )

    def __call__(
        self,
        ids_BL: Array,
        positions_BL: Array,
        seen: Array | None,
        cache: KVCache | None = None,
        write_B: Array | None = None,
        key_positions_BS: Array | None = None,
        *,
        keep: bool = False,
        layers: Sequence[dict[str, Array]] | None = None,
    ) -> tuple[Array, KVCache | None]:
        """Hidden states after the final norm, and the updated cache.

        Args:
          ids_BL: int32 token ids.
          positions_BL: int32 rotary positions.
          seen: bool `[B, L, S]`, whether a query may see a key; every query must see at least one.
            Without a cache S is L, and no query may see a later key (such pairs are not computed);
            or int32 `[B, L]`, up to which place each key is seen (`Rows.until_RL`); or None: by
            all that come after it. With a cache the keys are its prefix, then itself.
          cache: keys and values so far. The new ones are written at slots `write_B` to
            `write_B + L` of each row before attending; slots past the end are dropped.
          write_B: int32 offsets into the cache; required with a cache.
          key_positions_BS: int32 positions of the keys; required with a cache where the config has
            sliding layers, and by default `positions_BL`.
          keep: without a cache, return one of the new keys and values.
          layers: with a cache, what `layers_apart` gave, for a loop over tokens.

        Returns `[B, L, D]` in the compute dtype, and the cache (`None` without one). Raises
        `UserError` where a cache comes without what it needs.
        """
        self._check_call(cache, write_B, key_positions_BS)
        c = self.config
        # Whole rows on every device: a lookup along a sharded width would move activations instead.
        table_VD = self.embed[...]
        x_BLD = look_up(copied(table_VD, c.dtype), sink(table_VD), ids_BL)
        x_BLD = constrain(x_BLD, ("batch", "length", None))
        key_positions_BS = positions_BL if key_positions_BS is None else key_positions_BS
        call = LayerCall(
            config=c,
            adapter_scale=self.adapter_scale,
            rope=rope_tables(positions_BL, c.head_dim, c.rope_theta, c.rope_scaling),
            seen=_readable(c, seen),
            near=_near(
                positions_BL, key_positions_BS, c.sliding_window if c.sliding_layers else None
            ),
            write=write_B,
        )
        if cache is None:
            x_BLD, cache = _scan_layers(call, self._layer_arrays(), x_BLD, keep)
        else:
            x_BLD, cache = _each_layer(call, layers or self.layers_apart(), x_BLD, cache)
        return rms_norm(x_BLD, self.final_norm[...], c.rms_norm_eps), cache

    def logits(self, hidden: Array) -> Array:
        """Next-token logits, float32 `[..., V]`, of hidden states `[..., D]`."""
        return project(*self.head(hidden.dtype), hidden)

    def head(self, dtype: Any) -> tuple[Array, Array]:
        """The head `[V, D]` in a dtype, and where its gradient goes: what `project` takes."""
        head_VD = self.embed[...] if self.config.tie_embeddings else self.lm_head[...]
        return copied(head_VD, dtype), sink(head_VD)

    def layers_apart(self, join: bool = False) -> list[dict[str, Array]]:
        """The arrays of each layer, or those `joined`. Asked for before a loop they are cut out of
        the stack once, and copied with every step inside it."""
        stack, form = self._layer_arrays(), joined if join else dict
        layers = range(self.config.num_layers)
        return [form(jax.tree.map(lambda w, i=i: w[i], stack)) for i in layers]

    def _layer_arrays(self) -> dict[str, Array]:
        parts = [self.layers] if self.adapter is None else [self.layers, self.adapter]
        return {name: value[...] for part in parts for name, value in part.items()}

    def _check_call(self, cache: object, write_B: object, key_positions_BS: object) -> None:
        if cache is None:
            return
        if write_B is None:
            raise UserError("a cache was given without write_B: pass each row's write offset")
        if self.config.sliding_layers and key_positions_BS is None:
            raise UserError(
                "this model has sliding-window layers and a cache was given without "
                "key_positions_BS: pass the position of every cache slot"
            )


class LayerCall(NamedTuple):
    """What every layer of one forward shares. `near` is the window mask, `None` without one."""

    config: DecoderConfig
    adapter_scale: float
    rope: tuple[Array, Array]
    seen: Array | None
    near: Array | None
    write: Array | None


def _readable(config: DecoderConfig, seen: Array | None) -> Array | None:
    """As a mask, made once for all layers, unless they read places."""
    if seen is None or seen.ndim == 3:
        return seen
    c = config
    places = not c.sliding_layers and reads_places(c.attention_impl, seen.shape[1], c.num_kv_heads)
    return seen if places else prefix_mask(seen)


def _near(query_BL: Array, key_BS: Array, window: int | None) -> Array | None:
    """Transformers' window: a query sees the keys less than `window` positions before it."""
    if window is None:
        return None
    return query_BL[:, :, None] - key_BS[:, None, :] < window


def _scan_layers(
    call: LayerCall, layers: dict[str, Array], x_BLD: Array, keep: bool
) -> tuple[Array, KVCache | None]:
    """All layers in a loop, whose program does not grow with them."""
    c = call.config
    slides = jnp.array([i in c.sliding_layers for i in range(c.num_layers)])

    def step(x_BLD: Array, layer: tuple) -> tuple[Array, Pair | None]:
        x_BLD, (k, v) = _layer(call, x_BLD, *layer)
        return x_BLD, (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) if keep else None

    if c.remat != "none":
        # Inside a rolled scan nothing merges across steps; unrolled, only barriers prevent it.
        step = jax.checkpoint(step, prevent_cse=c.scan_unroll > 1, policy=REMAT[c.remat])
    x_BLD, new = jax.lax.scan(step, x_BLD, (layers, slides), unroll=c.scan_unroll)
    return x_BLD, None if new is None else KVCache(tuple(new[0]), tuple(new[1]))


def _each_layer(
    call: LayerCall, layers: Sequence[dict[str, Array]], x_BLD: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    """Layers written out, each with a cache of its own that is updated in place."""
    kept = []
    for i, p in enumerate(layers):
        slides = jnp.array(i in call.config.sliding_layers)
        before = None if cache.prefix is None else (cache.prefix.k[i], cache.prefix.v[i])
        x_BLD, own = _layer(call, x_BLD, p, slides, (cache.k[i], cache.v[i]), before)
        kept.append(own)
    k, v = zip(*kept, strict=True)
    return x_BLD, cache._replace(k=k, v=v)


def _layer(
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
    q_BLHF, *kv = _qkv(call, rms_norm(x_BLD, p["attn_norm"], eps), p)
    kept = kv[0], kv[1]
    if cache is not None and call.write is not None:
        kept = _write(cache[0], kv[0], call.write), _write(cache[1], kv[1], call.write)
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
    if kv % dict(jax.sharding.get_abstract_mesh().shape).get("tensor", 1) == 0:
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


def used_as(path: Any, x: Any, compute: str) -> Any:
    """The dtype that a forward pass takes a parameter in, by its place in a tree: kept in it, the
    results are the same. The gains of norms, and a head for values, multiply in float32."""
    name = jax.tree_util.keystr(path)
    wide = "_norm" in name or "['head']" in name
    return x.dtype if wide else jnp.dtype(compute)


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


def init_cache(
    config: DecoderConfig, batch: int, length: int, prefix: KVCache | None = None
) -> KVCache:
    """An empty cache of `batch` rows of `length` slots, in the compute dtype."""
    shape = (batch, config.num_kv_heads, length, config.head_dim)
    k, v = ([jnp.zeros(shape, config.dtype) for _ in range(config.num_layers)] for _ in "kv")
    return KVCache(tuple(k), tuple(v), prefix)


def causal_mask(segments_BL: Array) -> Array:
    """Causal within each segment: bool `[B, L, L]` from int32 segments, 0 meaning padding.

    A padding query sees itself, so that its softmax stays finite; nothing else sees padding.
    """
    length = segments_BL.shape[1]
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    real_B1L = (segments_BL != 0)[:, None, :]
    itself_1LL = jnp.eye(length, dtype=bool)[None]
    return (same_BLL & real_B1L & earlier(length)) | itself_1LL


def init_sharded(
    config: DecoderConfig, mesh: Mesh, rngs: nnx.Rngs, rules: Rules | None = None
) -> Decoder:
    """`Decoder(config, rngs=rngs)` laid out over the mesh; no device ever holds a full copy.

    Raises `UserError` where a dimension does not divide the mesh.
    """
    layout = tree_shardings(logical_axes(config), abstract_params(config), mesh, rules)
    init = jax.jit(functools.partial(init_params, config), out_shardings=layout)
    return Decoder.from_params(config, init(replicate(rngs.params(), mesh)))
