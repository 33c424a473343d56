"""One decoder for Qwen2, Qwen2.5, Qwen3 and Llama 3: the families differ by fields of a config.

Weights are stacked over layers and the forward is a `lax.scan`, so compile time does not grow with
depth. Who sees whom is an argument: a mask, such as `causal_mask` makes for packed segments, or up
to which place each token is seen, as in the rows of prefix trees that are trained on.

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
from jax_ragrl.models.attention import Pair, earlier, prefix_mask, reads_places
from jax_ragrl.models.config import (
    REMAT,
    DecoderConfig,
    abstract_params,
    init_params,
    logical_axes,
    weights,
)
from jax_ragrl.models.layer import LayerCall, joined, one_layer, rms_norm
from jax_ragrl.models.rope import rope_tables
from jax_ragrl.models.vocabulary import copied, look_up, project, sink
from jax_ragrl.runtime.sharding import Rules, constrain, replicate, tree_shardings

_drawn = jax.jit(init_params, static_argnums=0)


class KVCache(NamedTuple):
    """Keys and values of each layer, `[B, kv_heads, S, head_dim]`; keys are already rotated.

    Layers are apart: a slice of one array for all of them would be copied with every token. What
    siblings begin with is in `prefix` once: row `b` comes after its row `b // (B / its batch)`.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    prefix: KVCache | None = None


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
        self._adopt(_drawn(config, rngs.params()))

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
        x_BLD, (k, v) = one_layer(call, x_BLD, *layer)
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
        x_BLD, own = one_layer(call, x_BLD, p, slides, (cache.k[i], cache.v[i]), before)
        kept.append(own)
    k, v = zip(*kept, strict=True)
    return x_BLD, cache._replace(k=k, v=v)


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
