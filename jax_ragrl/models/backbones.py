"""The transformers under an encoder or a cross-encoder, by the `model_type` of `config.json`."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.models import bert, hf_config, modernbert
from jax_ragrl.models.bert import Bert, BertConfig
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.modernbert import ModernBert, ModernBertConfig
from jax_ragrl.models.module_weights import Path, load_module
from jax_ragrl.models.sentence_files import Settings
from jax_ragrl.runtime.sharding import make_mesh

MODEL_TYPES = (*bert.FAMILIES, "modernbert", *hf_config.FAMILIES)
# Encoders that are often asked for and are not implemented, with a supported one of equal use.
OTHER_MODELS = {
    "deberta-v2": "DeBERTa: BAAI/bge-reranker-base or cross-encoder/ms-marco-MiniLM-L6-v2",
    "distilbert": "DistilBERT: sentence-transformers/all-MiniLM-L6-v2 or intfloat/e5-small-v2",
    "gemma3_text": "EmbeddingGemma: Qwen/Qwen3-Embedding-0.6B",
    "gte": "GTE v1.5: Alibaba-NLP/gte-modernbert-base",
    "mistral": "Mistral: Qwen/Qwen3-Embedding-0.6B",
    "new": "GTE v1.5: Alibaba-NLP/gte-modernbert-base",
    "nomic_bert": "Nomic: nomic-ai/modernbert-embed-base",
    "t5": "T5: intfloat/e5-base-v2",
}


class DecoderBackbone(nnx.Module):
    """A causal decoder as a text encoder, whose last token has seen the whole text."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    def __call__(self, ids_BL: Array, mask_BL: Array, types_BL: Array | None = None) -> Array:
        """Returns hidden states `[B, L, D]` in the compute dtype; arguments as in `bert.Bert`."""
        # Padding comes after all real tokens, so these never attend to it; there are no segments.
        del mask_BL, types_BL
        positions_1L = jnp.arange(ids_BL.shape[1], dtype=jnp.int32)[None]
        return self.decoder(ids_BL, jnp.broadcast_to(positions_1L, ids_BL.shape), None)[0]


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A transformer that is not loaded yet, with hidden states of `width` D."""

    config: BertConfig | ModernBertConfig | DecoderConfig
    width: int
    vocab: int
    max_length: int
    pad_id: int

    @property
    def defaults(self) -> Settings:
        """Pooling and normalization of a folder without sentence-transformers files."""
        is_decoder = isinstance(self.config, DecoderConfig)
        return Settings("lasttoken" if is_decoder else "mean", normalise=is_decoder)

    def make(self) -> Any:
        """Returns the module with random weights; trace it with `nnx.eval_shape`."""
        match self.config:
            case BertConfig():
                return Bert(self.config, nnx.Rngs(0))
            case ModernBertConfig():
                return ModernBert(self.config, nnx.Rngs(0))
            case DecoderConfig():
                return DecoderBackbone(Decoder(self.config, rngs=nnx.Rngs(0)))

    def load(self, folder: pathlib.Path) -> Any:
        """Returns the module with the weights of a folder; errors as in `load_module`."""
        if not isinstance(self.config, DecoderConfig):
            return load_module(self.make, folder, *self.names())
        devices = jax.local_devices()
        # As many as divide the width share the weights; a batch is divided over the same devices.
        count = math.gcd(len(devices), self.width)
        mesh = None if count == 1 else make_mesh((1, count, 1), devices[:count])
        return DecoderBackbone(load_decoder(folder, mesh, self.config.dtype, head=False))

    def names(self) -> tuple[Callable[[Path], str], Callable[[str], str]]:
        """Returns the checkpoint's name of a parameter, and the canonical form of such a name."""
        if isinstance(self.config, BertConfig):
            family = self.config.family
            return functools.partial(bert.stored_name, family=family), bert.canonical
        return modernbert.stored_name, modernbert.canonical


def read_backbone(fields: dict[str, Any]) -> Backbone:
    """Returns the transformer that a `config.json` describes; `UserError` if unsupported."""
    kind = fields.get("model_type")
    if kind in bert.FAMILIES:
        config = bert.config_from_hf(fields)
        return Backbone(config, config.width, config.vocab, config.max_length, config.pad_id)
    if kind == "modernbert":
        modern = modernbert.config_from_hf(fields)
        return Backbone(modern, modern.width, modern.vocab, modern.max_length, modern.pad_id)
    if kind in hf_config.FAMILIES:
        return _decoder(fields)
    instead = f" ({OTHER_MODELS[kind]} is supported)" if kind in OTHER_MODELS else ""
    raise UserError(
        f"model_type={kind!r}{instead} is not a supported encoder: use a model of type "
        f"{', '.join(MODEL_TYPES)}"
    )


def _decoder(fields: dict[str, Any]) -> Backbone:
    config = hf_config.from_hf(fields)
    stored_dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    # CPUs multiply float32 faster, and half precision has no other use for a frozen model there.
    is_wide = jax.default_backend() == "cpu" or "16" not in stored_dtype
    dtype = "float32" if is_wide else "bfloat16"
    # A head would not be read, and published encoders are without one.
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype, tie_embeddings=True)
    pad_id = fields.get("pad_token_id") or 0
    return Backbone(config, config.hidden_size, config.vocab_size, config.max_positions, pad_id)
