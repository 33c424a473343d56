"""From hidden states to one vector per text: pooling, dense layers, normalization.

The modules that follow a transformer in sentence-transformers (Reimers and Gurevych 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


def mean_pool(hidden_BLD: Array, mask_BL: Array) -> Array:
    """Returns the mean over real tokens, float32 `[B, D]` (Reimers and Gurevych 2019)."""
    total_BD = jnp.sum(hidden_BLD, axis=1, where=mask_BL[..., None], dtype=jnp.float32)
    return total_BD / jnp.maximum(jnp.sum(mask_BL, axis=1, dtype=jnp.float32), 1.0)[:, None]


def first_pool(hidden_BLD: Array, _: Array) -> Array:
    """Returns the first token's hidden state, float32 `[B, D]`."""
    return hidden_BLD[:, 0].astype(jnp.float32)


def last_pool(hidden_BLD: Array, mask_BL: Array) -> Array:
    """Returns the last real token's hidden state, float32 `[B, D]`: it has seen the whole text."""
    last_B11 = jnp.maximum(jnp.sum(mask_BL, axis=1, dtype=jnp.int32) - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden_BLD, last_B11, axis=1)[:, 0].astype(jnp.float32)


# By the names in sentence-transformers' files.
POOLINGS: dict[str, Callable[[Array, Array], Array]] = {
    "mean": mean_pool,
    "cls": first_pool,
    "lasttoken": last_pool,
}
# Activations of dense layers and of scores, by the last part of PyTorch's dotted names.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "Sigmoid": jax.nn.sigmoid,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "ReLU": jax.nn.relu,
}


def l2_normalize(x_BD: Array) -> Array:
    """Scales rows to length one; a zero row remains zero."""
    return x_BD / jnp.maximum(jnp.linalg.norm(x_BD, axis=-1, keepdims=True), 1e-12)


class DenseSpec(NamedTuple):
    """A dense layer after pooling; `activation` is a key of `ACTIVATIONS`."""

    inputs: int
    outputs: int
    bias: bool
    activation: str


class Dense(nnx.Module):
    def __init__(self, spec: DenseSpec, rngs: nnx.Rngs):
        self.linear = nnx.Linear(spec.inputs, spec.outputs, use_bias=spec.bias, rngs=rngs)
        self.activation = spec.activation

    def __call__(self, x_BD: Array) -> Array:
        return ACTIVATIONS[self.activation](self.linear(x_BD))


class SentenceModel(nnx.Module):
    """Token ids to one vector per text, by a backbone and one of `POOLINGS`."""

    def __init__(self, backbone: Any, pooling: str, dense: list[Dense], normalise: bool):
        self.backbone, self.dense = backbone, nnx.List(dense)
        self.pooling, self.normalise = pooling, normalise

    def __call__(self, ids_BL: Array, mask_BL: Array) -> Array:
        """Returns float32 vectors `[B, D]`; arguments as in `bert.Bert`."""
        vectors_BD = POOLINGS[self.pooling](self.backbone(ids_BL, mask_BL), mask_BL)
        for dense in self.dense:
            vectors_BD = dense(vectors_BD)
        return l2_normalize(vectors_BD) if self.normalise else vectors_BD
