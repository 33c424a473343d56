"""Cross-encoders: a transformer that reads a query and a passage together and returns one score.

As sequence-classification models with one label in Transformers, and as `CrossEncoder` of
sentence-transformers uses them (Nogueira and Cho 2019, arXiv 1901.04085).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.models import bert
from jax_ragrl.models.backbones import OTHER_MODELS, Backbone, read_backbone
from jax_ragrl.models.by_name import resolve_model
from jax_ragrl.models.encoder import check_ids, load_tokenizer
from jax_ragrl.models.modernbert import ModernBertConfig
from jax_ragrl.models.module_weights import Path, leaf_name, load_module
from jax_ragrl.models.pooling import ACTIVATIONS, first_pool, mean_pool
from jax_ragrl.models.safetensors_io import weights_checksum
from jax_ragrl.models.sentence_files import SETTINGS, max_length, read_json
from jax_ragrl.models.text_batches import run_in_batches

FORMS = (
    "give the folder of a cross-encoder, or OWNER/NAME of one on the Hugging Face Hub, such as "
    "cross-encoder/ms-marco-MiniLM-L6-v2"
)
MODEL_TYPES = (*bert.FAMILIES, "modernbert")


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """The layers between the pooled hidden state and the score.

    `pooling` is `cls` or `mean`, `activation` is `tanh` or a key of `bert.ACTIVATIONS`, `norm` is
    the epsilon of a layer norm after it, or None. `names` are the checkpoint's names of the modules
    `dense`, `norm` and `score`.
    """

    pooling: str
    activation: str
    dense_bias: bool
    norm: float | None
    norm_bias: bool
    names: tuple[str, str, str]


def read_head(backbone: Backbone, fields: dict[str, Any]) -> HeadSpec:
    """Returns the head in a `config.json`; raises `UserError` if it has several labels."""
    # Transformers' default is two labels.
    labels = fields.get("num_labels") or len(fields.get("id2label") or "01")
    if labels != 1:
        raise UserError(
            f"config.json describes {labels} labels, but a cross-encoder has one score: {FORMS}"
        )
    if isinstance(c := backbone.config, ModernBertConfig):
        return HeadSpec(
            fields.get("classifier_pooling", "cls"),
            fields.get("classifier_activation", "gelu"),
            fields.get("classifier_bias", False),
            c.epsilon,
            c.norm_bias,
            ("head.dense", "head.norm", "classifier"),
        )
    # RoBERTa's dense layer is a part of its classifier; BERT's is the pooler.
    names = ("classifier.dense", "", "classifier.out_proj")
    if fields["model_type"] == "bert":
        names = ("pooler.dense", "", "classifier")
    return HeadSpec("cls", "tanh", True, None, False, names)


class ScoreModel(nnx.Module):
    def __init__(self, backbone: Any, spec: HeadSpec, width: int, rngs: nnx.Rngs):
        self.backbone, self.spec = backbone, spec
        self.dense = nnx.Linear(width, width, use_bias=spec.dense_bias, rngs=rngs)
        if spec.norm is not None:
            self.norm = nnx.LayerNorm(width, epsilon=spec.norm, use_bias=spec.norm_bias, rngs=rngs)
        self.score = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, ids_BL: Array, mask_BL: Array, types_BL: Array) -> Array:
        """Returns the logits of pairs, float32 `[B]`; arguments as in `bert.Bert`."""
        pool = mean_pool if self.spec.pooling == "mean" else first_pool
        pooled_BD = self.dense(pool(self.backbone(ids_BL, mask_BL, types_BL), mask_BL))
        pooled_BD = HEAD_ACTIVATIONS[self.spec.activation](pooled_BD)
        if self.spec.norm is not None:
            pooled_BD = self.norm(pooled_BD)
        return self.score(pooled_BD)[:, 0]


HEAD_ACTIVATIONS = bert.ACTIVATIONS | {"tanh": jax.numpy.tanh}


class CrossEncoder:
    """Scores pairs of texts of at most `longest` tokens; `load_cross_encoder` returns one.

    `activation`, a key of `pooling.ACTIVATIONS`, is that of the logits; `weights` is a checksum.
    """

    def __init__(
        self,
        model: ScoreModel,
        tokenizer: Any,
        backbone: Backbone,
        longest: int,
        activation: str,
        weights: str,
    ):
        self.backbone, self.longest, self.activation = backbone, longest, activation
        self.weights = weights
        self._graph, self._state = nnx.split(model)
        self._tokenizer = tokenizer

    def scores(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Returns the score of each pair (query, passage), float32 `[N]`, higher is better.

        A pair that is too long loses tokens of its longer text, one by one.
        """
        if not pairs:
            return np.zeros(0, np.float32)
        ids, types = self._tokenize(pairs)
        pad_id = self.backbone.pad_id
        logits_N = run_in_batches(self._graph, self._state, ids, pad_id, self.longest, types)
        return np.asarray(jax.device_get(ACTIVATIONS[self.activation](jax.device_put(logits_N))))

    def _tokenize(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], Any]:
        queries, passages = zip(*pairs, strict=True)
        encoding = self._tokenizer(
            list(queries),
            list(passages),
            truncation="longest_first",
            max_length=self.longest,
            return_attention_mask=False,
        )
        rows = encoding["input_ids"]
        check_ids(rows, self.backbone)
        # Tokenizers of models without segments return none.
        return rows, encoding.get("token_type_ids") or [[0] * len(row) for row in rows]


def load_cross_encoder(name: pathlib.Path | str) -> CrossEncoder:
    """Loads a cross-encoder with one label, of the BERT family or ModernBERT.

    `name` is a folder, or OWNER/NAME on the Hub. Raises `UserError` if there is no such model, it
    is of another kind or has several labels, or its weights are missing or misshapen.
    """
    folder = resolve_model(name, forms=FORMS)
    fields = read_json(folder / "config.json")
    if (kind := fields.get("model_type")) not in MODEL_TYPES:
        instead = f" ({OTHER_MODELS[kind]} is supported)" if kind in OTHER_MODELS else ""
        raise UserError(
            f"{folder} has model_type={kind!r}{instead}, which is not a supported cross-encoder: "
            f"use a sequence-classification model of type {', '.join(MODEL_TYPES)}"
        )
    kinds = [entry["type"].rsplit(".", 1)[-1] for entry in read_json(folder / "modules.json")]
    if kinds not in ([], ["Transformer"]):
        raise UserError(f"{folder} has the modules {kinds}, which are not supported: {FORMS}")
    backbone = read_backbone(fields)
    spec = read_head(backbone, fields)
    saved = read_json(folder / SETTINGS)
    if prompt := (saved.get("prompts") or {}).get(saved.get("default_prompt_name")):
        raise UserError(
            f"{folder} scores pairs with the prompt {prompt!r} of its {SETTINGS}, which is not "
            f"implemented: {FORMS}"
        )
    # A tokenizer may accept more tokens than the model has positions.
    longest = min(max_length(folder), backbone.max_length)
    tokenizer = load_tokenizer(folder, backbone)
    model, activation = _load_model(folder, backbone, spec), score_activation(fields | saved)
    weights = weights_checksum(folder)
    return CrossEncoder(model, tokenizer, backbone, longest, activation, weights)


def score_activation(fields: dict[str, Any]) -> str:
    """Returns the activation of the logits, else the sigmoid.

    `fields` are those of `config.json` and of sentence-transformers' settings, which come first.
    """
    newer = (fields.get("sentence_transformers") or {}).get("activation_fn")
    older = fields.get("sbert_ce_default_activation_function")
    name = fields.get("activation_fn") or newer or older or "Sigmoid"
    activation = name.rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        raise UserError(
            f"the config names the activation {name!r}, which is not supported: write one of "
            f"{', '.join(ACTIVATIONS)} into it"
        )
    return activation


def _load_model(folder: pathlib.Path, backbone: Backbone, spec: HeadSpec) -> ScoreModel:
    body_name, canonical = backbone.names()
    head = dict(zip(("dense", "norm", "score"), spec.names, strict=True))

    def stored_name(path: Path) -> str:
        if path[0] == "backbone":
            return body_name(path[1:])
        return f"{head[path[0]]}.{leaf_name(path)}"

    def make() -> ScoreModel:
        return ScoreModel(backbone.make(), spec, backbone.width, nnx.Rngs(0))

    return load_module(make, folder, stored_name, canonical)
