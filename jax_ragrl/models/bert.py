"""One Flax NNX encoder for BERT, RoBERTa and XLM-RoBERTa, which differ by a small table.

Post-layer-norm, learned positions, one segment. Devlin et al. 2019, Conneau et al. 2020.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.models import safetensors_io

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences between model types.

    Fields:
      position_after_pad: whether the first position is the padding id plus one (RoBERTa).
      prefix: the prefix of the weights' names in a checkpoint.
    """

    position_after_pad: bool
    prefix: str


FAMILIES = {
    "bert": Family(position_after_pad=False, prefix="bert."),
    "roberta": Family(position_after_pad=True, prefix="roberta."),
    "xlm-roberta": Family(position_after_pad=True, prefix="roberta."),
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The sizes and numerics of an encoder.

    Fields:
      vocab: rows of the word embeddings.
      width: D, the width of the hidden states.
      layers, heads: the numbers of layers and of attention heads.
      hidden: the width of the two-layer network.
      positions: rows of the position embeddings.
      types: rows of the segment embeddings, of which the first is used.
      epsilon: added to the variance of a layer norm.
      activation: a key of `ACTIVATIONS`.
      pad_id: the token id of padding.
      first_position: the position of the first token.
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

    @property
    def max_length(self) -> int:
        """The maximum of tokens: those that have a position embedding."""
        return self.positions - self.first_position


def config_from_hf(fields: dict[str, Any]) -> BertConfig:
    """Returns the config of the fields of a Hugging Face `config.json`.

    Raises:
      UserError: another family, relative positions, an unknown activation or a missing field.
    """
    kind, activation = fields.get("model_type"), fields.get("hidden_act", "gelu")
    positions = fields.get("position_embedding_type", "absolute")
    if kind not in FAMILIES or activation not in ACTIVATIONS or positions != "absolute":
        raise UserError(
            f"model_type={kind!r} with {activation!r} and {positions!r} positions is not "
            f"supported: use one of {', '.join(FAMILIES)} with absolute positions"
        )
    try:
        after_pad = FAMILIES[kind].position_after_pad
        # The defaults of Transformers: 0 for BERT, 1 for RoBERTa.
        pad_id = fields.get("pad_token_id", int(after_pad))
        return BertConfig(
            vocab=fields["vocab_size"],
            width=fields["hidden_size"],
            layers=fields["num_hidden_layers"],
            heads=fields["num_attention_heads"],
            hidden=fields["intermediate_size"],
            positions=fields["max_position_embeddings"],
            types=fields["type_vocab_size"],
            epsilon=fields.get("layer_norm_eps", 1e-12),
            activation=activation,
            pad_id=pad_id,
            first_position=pad_id + 1 if after_pad else 0,
        )
    except KeyError as error:
        raise UserError(
            f"config.json of a {kind} model lacks {error}: copy the original file"
        ) from error


class Layer(nnx.Module):
    """Attention and a two-layer network; each is added to its input and then normalized."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        """Initializes the parameters of a layer from `rngs`."""
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

    def __call__(self, hidden_BLD: Array, mask_BL: Array) -> Array:
        """Returns the next hidden states, float32 `[B, L, D]`; masked keys get no attention."""
        split = (*hidden_BLD.shape[:2], self.heads, -1)
        query, key, value = (
            project(hidden_BLD).reshape(split) for project in (self.query, self.key, self.value)
        )
        attention = jax.nn.dot_product_attention(query, key, value, mask=mask_BL[:, None, None, :])
        attended_BLD = self.attention_out(attention.reshape(hidden_BLD.shape))
        hidden_BLD = self.attention_norm(hidden_BLD + attended_BLD)
        wide = ACTIVATIONS[self.activation](self.up(hidden_BLD))
        return self.down_norm(hidden_BLD + self.down(wide))


class Bert(nnx.Module):
    """A text encoder from token ids to hidden states."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        """Initializes the parameters of an encoder from `rngs`."""
        self.words = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.positions, config.width, rngs=rngs)
        self.types = nnx.Embed(config.types, config.width, rngs=rngs)
        self.norm = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.first_position = config.first_position

    def __call__(self, ids_BL: Array, mask_BL: Array) -> Array:
        """Returns hidden states, float32 `[B, L, D]`.

        Args:
          ids_BL: int32 token ids, padded on the right.
          mask_BL: bool, False at padding.
        """
        positions_L = jnp.arange(ids_BL.shape[1]) + self.first_position
        # Every text is one segment, so all tokens have type 0.
        place_LD = self.positions(positions_L) + self.types(jnp.zeros_like(positions_L))
        hidden_BLD = self.norm(self.words(ids_BL) + place_LD[None])
        for layer in self.layers:
            hidden_BLD = layer(hidden_BLD, mask_BL)
        return hidden_BLD


# Hugging Face's names of the modules here.
TOP_NAMES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
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


def hf_name(path: tuple[Any, ...]) -> str:
    """Returns the checkpoint's name of a parameter.

    `('layers', 0, 'up', 'bias')` is `encoder.layer.0.intermediate.dense.bias`.
    """
    leaf = "bias" if path[-1] == "bias" else "weight"
    if path[0] == "layers":
        return f"encoder.layer.{path[1]}.{LAYER_NAMES[path[2]]}.{leaf}"
    return f"{TOP_NAMES[path[0]]}.{leaf}"


def _canonical(name: str) -> str:
    """Returns a checkpoint's name without the prefix and with the current names of LayerNorm."""
    for prefix in {family.prefix for family in FAMILIES.values()}:
        name = name.removeprefix(prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def read_tensors(folder: pathlib.Path, names: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (canonical name, float32 array) of the named tensors, one in memory at a time."""
    for name, path in safetensors_io.locate(folder).items():
        if _canonical(name) in names:
            tensor = safetensors_io.read(path, name, (slice(None),))
            yield _canonical(name), np.asarray(tensor, np.float32)


def _to_device(path: tuple[Any, ...], tensor: np.ndarray, shape: tuple[int, ...]) -> Array:
    """Puts a tensor on the device; kernels are `[in, out]` here and `[out, in]` in a checkpoint."""
    # PyTorch multiplies by the transposed kernel.
    tensor = tensor.T if path[-1] == "kernel" else tensor
    if tensor.shape != shape:
        raise UserError(
            f"weight {hf_name(path)} has shape {tensor.shape}, the config asks for {shape}: "
            "take config.json and model.safetensors from one model"
        )
    return jax.device_put(np.ascontiguousarray(tensor))


def load_bert(folder: pathlib.Path, config: BertConfig) -> Bert:
    """Returns the encoder of a Hugging Face folder with float32 weights.

    Weights are read one tensor at a time, so the host never holds a second copy of the model.

    Raises:
      UserError: there are no safetensors, or a weight is missing or has a wrong shape.
    """
    abstract = nnx.eval_shape(lambda: Bert(config, nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    # Shapes only: the random weights of an initialization would be thrown away.
    flat = dict(nnx.to_flat_state(state))
    paths = {hf_name(path): path for path in flat}
    arrays = {}
    for name, tensor in read_tensors(folder, paths):
        path = paths[name]
        arrays[path] = flat[path].replace(_to_device(path, tensor, flat[path].shape))
    missing = [name for name, path in paths.items() if path not in arrays]
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} weights, e.g. {missing[0]}: copy it again")
    return nnx.merge(graph, nnx.from_flat_state(arrays))
