"""Pooling, prefixes and lengths in the sentence-transformers files of a model folder.

The files are followed as sentence-transformers does; a folder without them takes the defaults of
its kind of model. Some models need prefixes that their files lack: `KNOWN_PREFIXES`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any, NamedTuple

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads
from jax_ragrl.models.pooling import ACTIVATIONS, POOLINGS, DenseSpec

SETTINGS = "config_sentence_transformers.json"
DENSE = {"bias": True, "activation_function": "Tanh", "use_residual": False}
DENSE_TENSORS = ("module_input_name", "module_output_name")
# The settings of a transformer; newer versions of the library write the first name.
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Of these settings and of those of the model: what changes vectors and is not implemented.
OTHER_SETTINGS = (
    *("config_args", "config_kwargs", "processing_kwargs", "processor_kwargs", "tokenizer_args"),
    *("query_expansion", "query_length", "document_length", "truncate_dim"),
)
MOST = 32768  # tokens, if the files set no limit or, as some tokenizers do, 1e30


@dataclasses.dataclass(frozen=True)
class Settings:
    """How texts become token ids, and hidden states a vector.

    Fields:
      pooling: `mean`, `cls` (first token) or `lasttoken`.
      normalise: whether vectors are scaled to length one.
      max_length: tokens of the longest input; longer texts are truncated.
      query_prefix, passage_prefix: text put before every query or passage.
    """

    pooling: str = "mean"
    normalise: bool = True
    max_length: int = 512
    query_prefix: str = ""
    passage_prefix: str = ""


class Prefixes(NamedTuple):
    """The prefixes that a family's model card asks for."""

    query: str
    passage: str


# By a pattern of the model's name, the first match counts. Sources: the model cards of
# intfloat/e5-base-v2, intfloat/multilingual-e5-large-instruct, BAAI/bge-base-en-v1.5,
# BAAI/bge-base-zh-v1.5 and nomic-ai/modernbert-embed-base.
TASK = "Given a web search query, retrieve relevant passages that answer the query"
KNOWN_PREFIXES = {
    r"e5-(mistral|.*instruct)": Prefixes(f"Instruct: {TASK}\nQuery: ", ""),
    r"\be5-(small|base|large)": Prefixes("query: ", "passage: "),
    r"bge-(small|base|large)-en": Prefixes(
        "Represent this sentence for searching relevant passages: ", ""
    ),
    r"bge-(small|base|large)-zh": Prefixes("为这个句子生成表示以用于检索相关文章：", ""),  # noqa: RUF001
    r"modernbert-embed": Prefixes("search_query: ", "search_document: "),
}


def model_prefixes(settings: Settings, source: pathlib.Path | str) -> Prefixes:
    """Returns the prefixes in a folder's files, or else those known by the name of a model."""
    own = Prefixes(settings.query_prefix, settings.passage_prefix)
    return own if any(own) else known_prefixes(source) or own


def known_prefixes(source: pathlib.Path | str) -> Prefixes | None:
    """Returns the prefixes of a family by the name of a model or folder; None for another."""
    parts = pathlib.PurePath(str(source)).parts
    # In the Hub's cache the name is that of an outer folder.
    names = [part for part in parts if part.startswith("models--")] or list(parts[-1:])
    name = names[0].lower().replace("_", "-") if names else ""
    matches = (card for pattern, card in KNOWN_PREFIXES.items() if re.search(pattern, name))
    return next(matches, None)


def read_json(path: pathlib.Path) -> Any:
    """Returns the contents of a JSON file; an empty dict if it does not exist."""
    if not path.is_file():
        return {}
    try:
        return loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is malformed JSON ({error}): copy it again") from error


class Modules(NamedTuple):
    """The folders of a model's modules, and whether the last module normalizes."""

    transformer: pathlib.Path
    pooling: pathlib.Path
    dense: tuple[pathlib.Path, ...] = ()
    normalise: bool = False


def read_modules(folder: pathlib.Path) -> Modules:
    """Returns the modules that `modules.json` lists; a plain folder has a transformer only.

    Raises `UserError` for other modules, or another order.
    """
    entries: list[dict[str, str]] = read_json(folder / "modules.json") or []
    if not entries:
        return Modules(folder, folder / "1_Pooling")
    kinds = [entry["type"].rsplit(".", 1)[-1] for entry in entries]
    paths = [folder / entry["path"] for entry in entries]
    order = "".join(f"{kind}," for kind in kinds)
    if not re.fullmatch("Transformer,Pooling,(Dense,)*(Normalize,)?", order):
        raise UserError(
            f"{folder} has the modules {kinds}, which are not supported: use an encoder of a "
            "Transformer, Pooling, any number of Dense, and Normalize or not, in this order"
        )
    normalise = kinds[-1] == "Normalize"
    return Modules(paths[0], paths[1], tuple(paths[2 : len(paths) - normalise]), normalise)


def dense_spec(folder: pathlib.Path) -> DenseSpec:
    """Returns the dense layer of a module's folder; `UserError` if it is not supported."""
    fields = DENSE | read_json(folder / "config.json")
    activation = fields["activation_function"].rsplit(".", 1)[-1]
    tensors = {fields.get(name) or "sentence_embedding" for name in DENSE_TENSORS}
    if activation not in ACTIVATIONS or fields["use_residual"] or tensors != {"sentence_embedding"}:
        raise UserError(
            f"{folder}/config.json is a dense layer with {activation}, a residual or other inputs, "
            f"which is not supported: use an encoder with one of {', '.join(ACTIVATIONS)}"
        )
    return DenseSpec(fields["in_features"], fields["out_features"], fields["bias"], activation)


def _pooling(path: pathlib.Path, default: str) -> str:
    fields = read_json(path)
    if not fields:
        return default
    if fields.get("include_prompt") is False:
        raise UserError(
            f"{path} pools without the prefix, which is not supported: use another encoder"
        )
    names = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "lasttoken",
    }
    is_flag = {key: key.startswith("pooling_") and on is True for key, on in fields.items()}
    flags = [names.get(key, key) for key in fields if is_flag[key]]
    # Newer files have one field with a name, older ones a flag per pooling.
    modes = [fields["pooling_mode"]] if isinstance(fields.get("pooling_mode"), str) else flags
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise UserError(
            f"{path} sets pooling {modes}, which is not supported: use an encoder with one of "
            f"{tuple(POOLINGS)}"
        )
    return modes[0]


def transformer_settings(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the settings of a transformer's folder; empty if it has none."""
    path = next((p for name in TRANSFORMER_FILES if (p := folder / name).is_file()), folder)
    return _only_known(path, read_json(path))


def _only_known(path: pathlib.Path, fields: dict[str, Any]) -> dict[str, Any]:
    for name in OTHER_SETTINGS:
        if fields.get(name):
            raise UserError(
                f"{path} sets {name} = {fields[name]!r}, which is not implemented: use another "
                "encoder, or remove the field to do without"
            )
    return fields


def max_length(transformer: pathlib.Path) -> int:
    """Returns the longest input that the files of a transformer set; `MOST` if none."""
    fields = transformer_settings(transformer)
    tokenizer = read_json(transformer / "tokenizer_config.json").get("model_max_length")
    return min(int(fields.get("max_seq_length") or tokenizer or MOST), MOST)


def read_settings(
    folder: pathlib.Path, defaults: Settings = Settings("mean", normalise=False)
) -> Settings:
    """Returns the settings in the sentence-transformers files of a folder.

    `defaults` are pooling and normalization of a folder without these files. Raises `UserError` for
    an unsupported module or pooling, or malformed JSON.
    """
    modules = read_modules(folder)
    path = folder / SETTINGS
    fields = _only_known(path, read_json(path))
    prompts = fields.get("prompts") or {}
    # Models name the prompt of a passage differently.
    passages = [prompts[k] for k in ("document", "passage", "corpus") if prompts.get(k)]
    is_plain = not (folder / "modules.json").is_file()
    return Settings(
        pooling=_pooling(modules.pooling / "config.json", defaults.pooling),
        # Retrieval takes inner products; they are cosines if vectors have length one.
        normalise=modules.normalise
        or fields.get("similarity_fn_name") == "cosine"
        or (is_plain and defaults.normalise),
        max_length=max_length(modules.transformer),
        query_prefix=prompts.get("query") or "",
        passage_prefix=passages[0] if passages else "",
    )
