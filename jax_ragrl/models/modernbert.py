"""ModernBERT in Flax NNX (Warner et al. 2024, arXiv 2412.13663), as in Transformers.

Pre-layer-norm, rotary positions and a gated two-layer network. Most layers attend to a window of
neighbors only, with a second rotary base.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.models.bert import ACTIVATIONS
from jax_ragrl.models.module_weights import Path, leaf_name
from jax_ragrl.models.rope import apply_rope, rope_tables

KINDS = ("full_attention", "sliding_attention")
# Of Transformers, for folders that do not say otherwise: one layer in three attends to everything.
PERIOD, GLOBAL_BASE, LOCAL_BASE, WINDOW = 3, 160_000.0, 10_000.0, 128


@dataclasses.dataclass(frozen=True)
class ModernBertConfig:
    """The sizes and numerics of an encoder, named as in `config_from_hf`.

    `sliding` says per layer whether it attends within the window only, `reach` is the farthest
    neighbor within it, in tokens, and `bases` are the rotary bases of full and of sliding layers.
    """

    vocab: int
    width: int
    heads: int
    hidden: int
    max_length: int
    sliding: tuple[bool, ...]
    reach: int
    bases: tuple[float, float]
    epsilon: float
    activation: str
    norm_bias: bool
    attention_bias: bool
    hidden_bias: bool
    pad_id: int


def config_from_hf(fields: dict[str, Any]) -> ModernBertConfig:
    """Returns the config of a `config.json`; `UserError` if a field is missing or unsupported."""
    activation = fields.get("hidden_activation", "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(
            f"config.json has the activation {activation!r}, which is not supported: use a model "
            f"with one of {', '.join(ACTIVATIONS)}"
        )
    try:
        # Defaults as in Transformers: a file may omit the fields.
        return ModernBertConfig(
            vocab=fields["vocab_size"],
            width=fields["hidden_size"],
            heads=fields["num_attention_heads"],
            hidden=fields["intermediate_size"],
            max_length=fields.get("max_position_embeddings", 8192),
            sliding=_sliding(fields),
            reach=fields.get("local_attention", WINDOW) // 2,
            bases=_bases(fields),
            epsilon=fields.get("norm_eps", 1e-5),
            activation=activation,
            norm_bias=fields.get("norm_bias", False),
            attention_bias=fields.get("attention_bias", False),
            hidden_bias=fields.get("mlp_bias", False),
            pad_id=fields.get("pad_token_id", 50283) or 0,
        )
    except KeyError as error:
        raise UserError(
            f"config.json of a ModernBERT model lacks {error}: copy the original file"
        ) from error


def _sliding(fields: dict[str, Any]) -> tuple[bool, ...]:
    """Transformers 5 lists `layer_types`; before, every n-th layer attended to everything."""
    layers, period = fields["num_hidden_layers"], fields.get("global_attn_every_n_layers", PERIOD)
    types = fields.get("layer_types") or [KINDS[i % period != 0] for i in range(layers)]
    if len(types) != layers or not set(types) <= set(KINDS):
        raise UserError(
            f"config.json lists layer_types {sorted(set(types))} for {layers} layers: one of "
            f"{', '.join(KINDS)} per layer is needed"
        )
    return tuple(kind == "sliding_attention" for kind in types)


def _bases(fields: dict[str, Any]) -> tuple[float, float]:
    """Transformers 5 writes `rope_parameters` per kind of layer; before, two fields."""
    parameters = fields.get("rope_parameters") or {}
    ropes = [parameters.get(kind) or {} for kind in KINDS]
    kinds = {rope.get("rope_type", "default") for rope in ropes}
    if kinds != {"default"} or fields.get("rope_scaling"):
        raise UserError("config.json stretches the rotary positions: use another checkpoint")
    everywhere = fields.get("global_rope_theta", GLOBAL_BASE)
    # Without a base of its own (null), a local layer has that of the others.
    old = everywhere, fields.get("local_rope_theta", LOCAL_BASE) or everywhere
    full, sliding = (
        float(rope.get("rope_theta") or base) for rope, base in zip(ropes, old, strict=True)
    )
    return full, sliding


class Layer(nnx.Module):
    """Attention and a gated network; each is added to the residual stream."""

    def __init__(self, config: ModernBertConfig, index: int, rngs: nnx.Rngs):
        width, bias = config.width, config.attention_bias
        norm = functools.partial(
            nnx.LayerNorm, width, epsilon=config.epsilon, use_bias=config.norm_bias, rngs=rngs
        )
        # The first layer has no norm, because the embeddings end with one.
        self.attention_norm = norm() if index else None
        self.qkv = nnx.Linear(width, 3 * width, use_bias=bias, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, use_bias=bias, rngs=rngs)
        self.hidden_norm = norm()
        self.up = nnx.Linear(width, 2 * config.hidden, use_bias=config.hidden_bias, rngs=rngs)
        self.down = nnx.Linear(config.hidden, width, use_bias=config.hidden_bias, rngs=rngs)
        self.heads, self.activation = config.heads, config.activation

    def __call__(self, x_BLD: Array, mask: Array, rope: tuple[Array, Array]) -> Array:
        """Returns the next residual stream; `mask` is bool `[B, 1, L or 1, L]`."""
        h_BLD = x_BLD if self.attention_norm is None else self.attention_norm(x_BLD)
        # One matrix holds query, key and value of all heads, in this order.
        qkv_BL3HF = self.qkv(h_BLD).reshape(*x_BLD.shape[:2], 3, self.heads, -1)
        query, key, value = (qkv_BL3HF[:, :, i] for i in range(3))
        query, key = apply_rope(query, rope), apply_rope(key, rope)
        attention = jax.nn.dot_product_attention(query, key, value, mask=mask)
        x_BLD = x_BLD + self.attention_out(attention.reshape(x_BLD.shape))
        # The first half goes through the activation, and the second one multiplies it.
        value, gate = jnp.split(self.up(self.hidden_norm(x_BLD)), 2, axis=-1)
        return x_BLD + self.down(ACTIVATIONS[self.activation](value) * gate)


class ModernBert(nnx.Module):
    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        norm = functools.partial(
            nnx.LayerNorm, config.width, epsilon=config.epsilon, use_bias=config.norm_bias
        )
        self.words = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.norm = norm(rngs=rngs)
        self.layers = nnx.List([Layer(config, i, rngs) for i in range(len(config.sliding))])
        self.final_norm = norm(rngs=rngs)
        self.config = config

    def __call__(self, ids_BL: Array, mask_BL: Array, types_BL: Array | None = None) -> Array:
        """Returns hidden states, float32 `[B, L, D]`; arguments as in `bert.Bert`."""
        del types_BL  # the model has no segments
        c, at_1L = self.config, jnp.arange(ids_BL.shape[1])[None]
        # Tables depend on the length alone, so all layers of a kind share them.
        ropes = [rope_tables(at_1L, c.width // c.heads, base, None) for base in c.bases]
        near_1LL = jnp.abs(at_1L[:, :, None] - at_1L[:, None, :]) <= c.reach
        mask_B11L = mask_BL[:, None, None, :]
        # By `is_sliding`: every token of the text, or those within the window on both sides.
        masks = (mask_B11L, mask_B11L & near_1LL[:, None])
        x_BLD = self.norm(self.words(ids_BL))
        for layer, is_sliding in zip(self.layers, c.sliding, strict=True):
            x_BLD = layer(x_BLD, masks[is_sliding], ropes[is_sliding])
        return self.final_norm(x_BLD)


TOP_NAMES = {
    "words": "embeddings.tok_embeddings",
    "norm": "embeddings.norm",
    "final_norm": "final_norm",
}
LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "qkv": "attn.Wqkv",
    "attention_out": "attn.Wo",
    "hidden_norm": "mlp_norm",
    "up": "mlp.Wi",
    "down": "mlp.Wo",
}


def stored_name(path: Path) -> str:
    """Returns the checkpoint's name of a parameter; an example is in `bert.stored_name`."""
    if path[0] == "layers":
        return f"layers.{path[1]}.{LAYER_NAMES[path[2]]}.{leaf_name(path)}"
    return f"{TOP_NAMES[path[0]]}.{leaf_name(path)}"


def canonical(name: str) -> str:
    """Returns a checkpoint's name without the prefix of models with a head."""
    return name.removeprefix("model.")
