"""A tiny random policy and its tokenizer, for tests of code around a model."""

import functools
import pathlib
from typing import Any

from flax import nnx

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.models.split import SplitModel
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.text.training import train_tokenizer

WORDS = "route filter decide Question Thought Action Retrieval Planning who directed the film"


@functools.cache
def tokenizer() -> ChatTokenizer:
    """A byte-level tokenizer of 300 ids."""
    return ChatTokenizer(train_tokenizer([WORDS] * 3, 300))


@functools.cache
def policy(seed: int = 0) -> tuple[Any, Any]:
    """(graph, params) of a random decoder: 2 layers, width 16."""
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = DecoderConfig(len(tokenizer()), 16, 32, num_layers=2, rope_theta=1e4, **heads)
    return nnx.split(Decoder(config, rngs=nnx.Rngs(seed)), nnx.Param)


@functools.cache
def split_policy(seed: int = 0) -> SplitModel:
    """The decoder of `policy` as a `SplitModel`."""
    return SplitModel.from_model(nnx.merge(*policy(seed)))


def saved_policy(folder: pathlib.Path) -> pathlib.Path:
    """Saves `policy` and its tokenizer below a folder; returns the folder of the policy."""
    tokenizer().save(folder / "tokenizer")
    return save_decoder(nnx.merge(*policy()), folder / "policy", folder / "tokenizer")
