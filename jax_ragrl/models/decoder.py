"""One decoder for Qwen2, Qwen2.5, Qwen3 and Llama 3, which differ by fields of a config.

A forward pass is: embedding lookup, the layers (`models/layer.py`), a final norm, and, on request,
logits. Weights are stacked over layers and the forward is a `lax.scan`, so compile time does not
grow with depth; decoding with a cache unrolls the layers instead.

Sources: Qwen2 (arXiv 2407.10671), Qwen3 (2505.09388), Llama 3 (2407.21783), as in Transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jax_ragrl.errors import UserError
from jax_ragrl.models.attention import (
    KeysValues,
    lower_triangular_mask,
    visible_until_mask,
)
from jax_ragrl.models.config import (
    REMAT,
    DecoderConfig,
    abstract_params,
    init_params,
    logical_axes,
    weights,
)
from jax_ragrl.models.layer import LayerCall, decoder_layer, fuse_projections, rms_norm
from jax_ragrl.models.prefix_attention import VisibleKeys, uses_decode_kernel
from jax_ragrl.models.rope import rope_tables
from jax_ragrl.models.saveable import STREAM, pack, saveable, unpack
from jax_ragrl.models.vocabulary import compute_copy, gradient_sink, look_up, project
from jax_ragrl.runtime.sharding import Rules, constrain, replicate, tree_shardings

_init_params = jax.jit(init_params, static_argnums=0)


class KVCache(NamedTuple):
    """Keys and values of all layers; keys are already rotated.

    Fields:
      k, v: per layer an array `[B, K, S, F]` in the compute dtype. Layers are separate arrays,
        because a slice of one array for all layers would be copied for every token.
      prefix: the cache of the prompts, `[P, K, S', F]`, read before the own slots: row `b`
        continues prompt `b // (B / P)`, so siblings share one copy. None for such a cache itself,
        and while it is passed apart from the own slots.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    prefix: KVCache | None = None


class Decoder(nnx.Module):
    """A decoder-only transformer. Split it (`SplitModel`) to pass it to jitted functions.

    Its arrays are those of `weights`, and of an adapter (`models/lora.py`) if it has one.
    """

    embed: nnx.Param
    final_norm: nnx.Param
    layers: nnx.Dict
    lm_head: nnx.Param
    adapter: nnx.Dict | None

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Initializes every parameter; consumes one `params` key of `rngs`."""
        self.config = config
        self.adapter_scale = 0.0
        self.adapter = nnx.data(None)
        self._set_params(_init_params(config, rngs.params()))

    def _set_params(self, params: dict) -> None:
        for name, value in params.items():
            if name == "layers":
                self.layers = nnx.Dict({k: nnx.Param(v) for k, v in value.items()})
            else:
                setattr(self, name, nnx.Param(value))

    @classmethod
    def from_params(cls, config: DecoderConfig, params: dict) -> Decoder:
        """Returns a decoder around existing arrays in the tree of `weights`, without copying."""
        decoder = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))
        decoder._set_params(params)
        return decoder

    def params(self) -> dict:
        """Returns the arrays in the tree of `weights`, without the adapter."""
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
        visibility: Array | VisibleKeys | None,
        cache: KVCache | None = None,
        write_B: Array | None = None,
        key_positions_BS: Array | None = None,
        *,
        return_cache: bool = False,
        layers: Sequence[dict[str, Array]] | None = None,
    ) -> tuple[Array, KVCache | None]:
        """Runs the decoder up to its final norm.

        Args:
          ids_BL, positions_BL: int32 token ids and rotary positions.
          visibility: which keys each query attends to, one of
            a bool mask `[B, L, S]` with at least one True per query. Without a cache S is L, and
            later keys are not computed; with one the keys are its prefix, then its own slots.
            int32 places `[B, L]`, without a cache only: key j is visible to queries from place j
            up to this place, exclusive, as in a row that holds a prefix tree.
            None, without a cache only: each token attends to itself and all earlier ones.
            `VisibleKeys`, with a cache and one token per row.
          cache: keys and values so far, with a prefix. The new ones are written to slots `write_B`
            to `write_B + L` of each row before attending; slots past the end are dropped.
          write_B: int32 offsets into the cache; required with a cache.
          key_positions_BS: int32 positions of the keys, by default `positions_BL`; required with a
            cache if the config has sliding layers.
          return_cache: without a cache, also return one with the new keys and values.
          layers: with a cache, the result of `unstacked_layers` from before a loop over tokens.

        Returns:
          Hidden states `[B, L, D]` in the compute dtype, and the cache (None without one).

        Raises:
          UserError: a cache without `write_B`, or without positions that sliding layers need.
        """
        c = self.config
        if cache is not None and write_B is None:
            raise UserError("a cache was given without write_B: pass each row's write offset")
        if cache is not None and c.sliding_layers and key_positions_BS is None:
            raise UserError(
                "this model has sliding-window layers and a cache was given without "
                "key_positions_BS: pass the position of every cache slot"
            )
        # 1. Embeddings. The table has whole rows on every device: with a width that is split, the
        # lookup would move activations between devices.
        table_VD = self.embed[...]
        x_BLD = look_up(compute_copy(table_VD, c.dtype), gradient_sink(table_VD), ids_BL)
        x_BLD = constrain(x_BLD, ("batch", "length", None))
        # 2. What all layers share: rotary tables and masks.
        key_positions_BS = positions_BL if key_positions_BS is None else key_positions_BS
        window_mask = None
        if c.sliding_layers and c.sliding_window is not None:
            # Transformers' sliding window: keys less than so many positions before a query.
            distance = positions_BL[:, :, None] - key_positions_BS[:, None, :]
            window_mask = distance < c.sliding_window
        call = LayerCall(
            config=c,
            adapter_scale=self.adapter_scale,
            rope=rope_tables(positions_BL, c.head_dim, c.rope_theta, c.rope_scaling),
            visibility=_for_layers(c, visibility, cache),
            window_mask=window_mask,
            write_B=write_B,
        )
        # 3. Layers, then the final norm.
        if cache is None:
            x_BLD, cache = _scan_layers(call, self._layer_arrays(), x_BLD, return_cache)
        else:
            x_BLD, cache = _unrolled_layers(call, layers or self.unstacked_layers(), x_BLD, cache)
        return rms_norm(x_BLD, self.final_norm[...], c.rms_norm_eps), cache

    def logits(self, hidden: Array) -> Array:
        """Returns next-token logits, float32 `[..., V]`, of hidden states `[..., D]`."""
        return project(*self.head(hidden.dtype), hidden)

    def head(self, dtype: Any) -> tuple[Array, Array]:
        """Returns the head `[V, D]` in a dtype and its gradient sink: arguments of `project`."""
        head_VD = self.embed[...] if self.config.tie_embeddings else self.lm_head[...]
        return compute_copy(head_VD, dtype), gradient_sink(head_VD)

    def unstacked_layers(self, fuse: bool = False) -> list[dict[str, Array]]:
        """Returns the arrays of each layer, with `fuse` as `fuse_projections` returns them.

        Call it before a loop over tokens: inside the loop the slices of the stacked arrays would be
        copied in every step.
        """
        stack, convert = self._layer_arrays(), fuse_projections if fuse else dict
        layers = range(self.config.num_layers)
        return [convert(jax.tree.map(lambda w, i=i: w[i], stack)) for i in layers]

    def _layer_arrays(self) -> dict[str, Array]:
        parts = [self.layers] if self.adapter is None else [self.layers, self.adapter]
        return {name: value[...] for part in parts for name, value in part.items()}


def _for_layers(
    config: DecoderConfig, visibility: Array | VisibleKeys | None, cache: KVCache | None
) -> Array | VisibleKeys | None:
    """Converts places, and counts that no kernel reads, to a mask, once for all layers."""
    if isinstance(visibility, VisibleKeys):
        assert cache is not None and cache.prefix is not None, "the counts are of two parts"
        slots = cache.prefix.k[0].shape[2], cache.k[0].shape[2]
        return visibility if uses_decode_kernel(config, *slots) else visibility.mask(*slots)
    if visibility is not None and visibility.ndim == 2:
        return visible_until_mask(visibility)
    return visibility


def _scan_layers(
    call: LayerCall, layers: dict[str, Array], x_BLD: Array, return_cache: bool
) -> tuple[Array, KVCache | None]:
    c = call.config
    is_sliding = jnp.array([i in c.sliding_layers for i in range(c.num_layers)])

    def step(x_BLD: Array, layer: tuple) -> tuple[Array, KeysValues | None]:
        x_BLD, (k, v) = decoder_layer(call, saveable(x_BLD, STREAM), *layer)
        new = (pack(jnp.swapaxes(k, 1, 2)), pack(jnp.swapaxes(v, 1, 2))) if return_cache else None
        return x_BLD, new

    if c.remat != "none":
        # XLA cannot merge recomputation across the steps of a scan.
        step = jax.checkpoint(step, prevent_cse=False, policy=REMAT[c.remat])
    x_BLD, new = jax.lax.scan(step, x_BLD, (layers, is_sliding))
    if new is None:
        return x_BLD, None
    k, v = (unpack(x, x_BLD.dtype) for x in new)
    return x_BLD, KVCache(tuple(k), tuple(v))


def _unrolled_layers(
    call: LayerCall, layers: Sequence[dict[str, Array]], x_BLD: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    """Runs the layers one by one, so each updates its own cache in place."""
    assert cache.prefix is not None, "decoding continues prompts"
    # Traced once, not per layer: on one core that halves the tracing and lowering of a program.
    run_layer = jax.jit(functools.partial(decoder_layer, call))
    new_kv = []
    for i, p in enumerate(layers):
        is_sliding = jnp.array(i in call.config.sliding_layers)
        layer_cache = (cache.prefix.k[i], cache.prefix.v[i]), (cache.k[i], cache.v[i])
        x_BLD, own_kv = run_layer(x_BLD, p, is_sliding, layer_cache)
        new_kv.append(own_kv)
    k, v = zip(*new_kv, strict=True)
    return x_BLD, cache._replace(k=k, v=v)


def init_cache(config: DecoderConfig, batch: int, length: int) -> KVCache:
    """Returns an empty cache of `batch` rows of `length` slots in the compute dtype."""
    shape = (batch, config.num_kv_heads, length, config.head_dim)
    k, v = ([jnp.zeros(shape, config.dtype) for _ in range(config.num_layers)] for _ in "kv")
    return KVCache(tuple(k), tuple(v))


def causal_mask(segments_BL: Array) -> Array:
    """Returns the causal mask within each segment, bool `[B, L, L]`.

    `segments_BL` are int32 numbers of segments, 0 for padding. A padding query attends to itself,
    so that its softmax stays finite; nothing else attends to padding.
    """
    length = segments_BL.shape[1]
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    real_B1L = (segments_BL != 0)[:, None, :]
    itself_1LL = jnp.eye(length, dtype=bool)[None]
    return (same_BLL & real_B1L & lower_triangular_mask(length)) | itself_1LL


def init_sharded(
    config: DecoderConfig, mesh: Mesh, rngs: nnx.Rngs, rules: Rules | None = None
) -> Decoder:
    """Returns `Decoder(config, rngs=rngs)` on a mesh; no device ever holds a full copy.

    Raises `UserError` if a dimension does not divide its mesh axis.
    """
    layout = tree_shardings(logical_axes(config), abstract_params(config), mesh, rules)
    init = jax.jit(functools.partial(init_params, config), out_shardings=layout)
    return Decoder.from_params(config, init(replicate(rngs.params(), mesh)))
