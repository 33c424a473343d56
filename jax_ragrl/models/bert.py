"""One Flax NNX encoder for BERT, RoBERTa, XLM-RoBERTa and MPNet, which differ by a small table.

Post-layer-norm, learned positions. Devlin et al. 2019, Conneau et al. 2020. MPNet (Song et al.
2020) adds a bias to the attention scores for the distance of two tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.models.module_weights import Path, leaf_name

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


# Hugging Face's names of the modules of a layer.
LAYER_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "down_norm": "output.LayerNorm",
}
MPNET_LAYER_NAMES = LAYER_NAMES | {
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "attention_out": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences between model types; `prefix` and `layer_names` are those of a checkpoint.

    `position_after_pad`: the first position is the padding id plus one (RoBERTa). `distances`:
    attention has a bias per distance of two tokens (MPNet).
    """

    position_after_pad: bool
    prefix: str
    distances: bool = False
    layer_names: Mapping[str, str] = dataclasses.field(default_factory=lambda: LAYER_NAMES)


FAMILIES = {
    "bert": Family(position_after_pad=False, prefix="bert."),
    "roberta": Family(position_after_pad=True, prefix="roberta."),
    "xlm-roberta": Family(position_after_pad=True, prefix="roberta."),
    "camembert": Family(position_after_pad=True, prefix="roberta."),
    "mpnet": Family(True, "mpnet.", distances=True, layer_names=MPNET_LAYER_NAMES),
}
# Of MPNet's distances: buckets, and the distance from which all share the last one.
BUCKETS, FARTHEST = 32, 128


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The sizes and numerics of an encoder, named as in `config_from_hf`.

    `positions` and `types` are rows of the position and segment embeddings (no `types`: MPNet), and
    `first_position` is the position of the first token.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int
    positions: int
    types: int
    epsilon: float
    activation: str
    pad_id: int
    first_position: int
    family: str = "bert"

    @property
    def max_length(self) -> int:
        return self.positions - self.first_position


def config_from_hf(fields: dict[str, Any]) -> BertConfig:
    """Returns the config of a `config.json`; `UserError` if a field is missing or unsupported."""
    kind, activation = fields.get("model_type"), fields.get("hidden_act", "gelu")
    positions = fields.get("position_embedding_type", "absolute")
    buckets = fields.get("relative_attention_num_buckets", BUCKETS)
    if buckets != BUCKETS:
        raise UserError(
            f"config.json has {buckets} buckets of distances, but only {BUCKETS} are implemented: "
            "use another checkpoint"
        )
    if kind not in FAMILIES or activation not in ACTIVATIONS or positions != "absolute":
        raise UserError(
            f"model_type={kind!r} with {activation!r} and {positions!r} positions is not "
            f"supported: use one of {', '.join(FAMILIES)} with absolute positions"
        )
    if fields.get("is_decoder"):
        raise UserError(
            "config.json sets is_decoder, so that tokens see earlier ones only, which is not "
            "implemented: use an encoder"
        )
    family = FAMILIES[kind]
    try:
        after_pad = family.position_after_pad
        # The defaults of Transformers: 0 for BERT, 1 for RoBERTa.
        pad_id = fields.get("pad_token_id")
        pad_id = int(after_pad) if pad_id is None else pad_id
        return BertConfig(
            vocab=fields["vocab_size"],
            width=fields["hidden_size"],
            layers=fields["num_hidden_layers"],
            heads=fields["num_attention_heads"],
            hidden=fields["intermediate_size"],
            positions=fields["max_position_embeddings"],
            types=0 if family.distances else fields["type_vocab_size"],
            epsilon=fields.get("layer_norm_eps", 1e-12),
            activation=activation,
            pad_id=pad_id,
            first_position=pad_id + 1 if after_pad else 0,
            family=kind,
        )
    except KeyError as error:
        raise UserError(
            f"config.json of a {kind} model lacks {error}: copy the original file"
        ) from error


class Layer(nnx.Module):
    """Attention and a two-layer network; each is added to its input and then normalized."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        width, norm = config.width, functools.partial(nnx.LayerNorm, epsilon=config.epsilon)
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, rngs=rngs)
        self.attention_norm = norm(width, rngs=rngs)
        self.up = nnx.Linear(width, config.hidden, rngs=rngs)
        self.down = nnx.Linear(config.hidden, width, rngs=rngs)
        self.down_norm = norm(width, rngs=rngs)
        self.heads, self.activation = config.heads, config.activation

    def __call__(self, hidden_BLD: Array, mask_BL: Array, bias_BHLL: Array | None) -> Array:
        """Returns the next hidden states, float32; the bias is added to the scores."""
        split = (*hidden_BLD.shape[:2], self.heads, -1)
        query, key, value = (
            project(hidden_BLD).reshape(split) for project in (self.query, self.key, self.value)
        )
        mask_B11L = mask_BL[:, None, None, :]
        attention = jax.nn.dot_product_attention(query, key, value, bias_BHLL, mask_B11L)
        attended_BLD = self.attention_out(attention.reshape(hidden_BLD.shape))
        hidden_BLD = self.attention_norm(hidden_BLD + attended_BLD)
        wide = ACTIVATIONS[self.activation](self.up(hidden_BLD))
        return self.down_norm(hidden_BLD + self.down(wide))


class Bert(nnx.Module):
    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.words = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.positions, config.width, rngs=rngs)
        if config.types:
            self.types = nnx.Embed(config.types, config.width, rngs=rngs)
        if FAMILIES[config.family].distances:
            self.distances = nnx.Embed(BUCKETS, config.heads, rngs=rngs)
        self.norm = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.config = config

    def __call__(self, ids_BL: Array, mask_BL: Array, types_BL: Array | None = None) -> Array:
        """Returns hidden states, float32 `[B, L, D]`, of int32 token ids, padded on the right.

        `mask_BL` is bool, False at padding; `types_BL` are int32 segments, None: all 0.
        """
        positions_L = jnp.arange(ids_BL.shape[1]) + self.config.first_position
        place_1LD = self.positions(positions_L)[None]
        if self.config.types and types_BL is None:
            # Every token has segment 0, so its row is added once for all texts.
            place_1LD = place_1LD + self.types(jnp.zeros_like(positions_L))[None]
        hidden_BLD = self.words(ids_BL) + place_1LD
        if self.config.types and types_BL is not None:
            hidden_BLD = hidden_BLD + self.types(types_BL)
        hidden_BLD = self.norm(hidden_BLD)
        bias_1HLL = None
        if FAMILIES[self.config.family].distances:
            # MPNet's layers share one bias of the scores, by distance.
            bias_LLH = self.distances(jnp.asarray(distance_buckets(ids_BL.shape[1])))
            bias_1HLL = jnp.transpose(bias_LLH, (2, 0, 1))[None]
        for layer in self.layers:
            hidden_BLD = layer(hidden_BLD, mask_BL, bias_1HLL)
        return hidden_BLD


def distance_buckets(length: int) -> np.ndarray:
    """Returns the bucket of each query and key, int32 `[L, L]` (Raffel et al. 2020, section 2.1).

    Half of the buckets are for keys after the query. In each half, half of the buckets are for one
    distance each, and the others grow geometrically.
    """
    at_L = np.arange(length)
    distance_LL = at_L[:, None] - at_L[None, :]
    far_LL, half = np.abs(distance_LL), BUCKETS // 2
    exact = half // 2
    # Float32 as in PyTorch, so that a distance at the edge of a bucket is rounded the same way.
    ratio_LL = np.log(np.maximum(far_LL, 1).astype(np.float32) / np.float32(exact))
    steps_LL = ratio_LL / np.float32(math.log(FARTHEST / exact)) * np.float32(half - exact)
    log_LL = np.minimum(exact + steps_LL.astype(np.int32), half - 1)
    return (np.where(far_LL < exact, far_LL, log_LL) + (distance_LL < 0) * half).astype(np.int32)


TOP_NAMES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "distances": "encoder.relative_attention_bias",
}


def stored_name(path: Path, family: str = "bert") -> str:
    """Returns the checkpoint's name of a parameter of a family.

    `('layers', 0, 'up', 'bias')` is `encoder.layer.0.intermediate.dense.bias`.
    """
    if path[0] == "layers":
        names = FAMILIES[family].layer_names
        return f"encoder.layer.{path[1]}.{names[path[2]]}.{leaf_name(path)}"
    return f"{TOP_NAMES[path[0]]}.{leaf_name(path)}"


def canonical(name: str) -> str:
    """Returns a checkpoint's name without the prefix and with the current names of LayerNorm."""
    for prefix in {family.prefix for family in FAMILIES.values()}:
        name = name.removeprefix(prefix)
    # Checkpoints converted from TensorFlow have its names of these parameters.
    for former, current in (("gamma", "weight"), ("beta", "bias")):
        name = name.replace(f"LayerNorm.{former}", f"LayerNorm.{current}")
    return name
