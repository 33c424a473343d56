"""Config sections with a `kind`: a retriever's index and a frozen language model.

Each kind is a dataclass with exactly the keys that it reads, and a section is a union of kinds:
`config.schema.build` selects the dataclass by the key `kind`, so that a key which the selected
kind does not read is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jax_ragrl.config.schema import kinds_of, local
from jax_ragrl.errors import UserError

# A `Literal`, so that `schema.convert` refuses other dtypes when the config is read.
Dtype = Literal["float32", "bfloat16"]
Thinking = Literal["off", "on"]


@dataclasses.dataclass(frozen=True)
class VectorIndex:
    """A vector index of the corpus on this machine.

    Fields:
      encoder: `lexical`, `minilm`, or the folder of an encoder.
      kind: `scann` searches approximately, `exact` compares with every passage.
      dtype: the dtype of stored vectors.
      folder: the index is opened if it exists there and built there otherwise; empty: the run's
        work folder.
    """

    encoder: str = "lexical"
    kind: Literal["scann", "exact"] = "scann"
    dtype: Dtype = "float32"
    folder: str = ""

    def __post_init__(self) -> None:
        # Checked here, because the encoding of a corpus may take hours before the folder is used.
        if self.folder:
            local(self.folder)


@dataclasses.dataclass(frozen=True)
class RemoteIndex:
    """A search server (`retrieval/remote.py`); it has its own corpus.

    Fields:
      url: the address of the server.
      retries: attempts after a failed request.
      timeout: seconds per request.
    """

    url: str
    retries: int = 5
    timeout: float = 60.0
    kind: Literal["remote"] = "remote"

    def __post_init__(self) -> None:
        _check_url(self.url, self.kind)


@dataclasses.dataclass(frozen=True)
class SearxngIndex:
    """A SearXNG service, which searches the web; `folder` caches its results.

    `retries` and `timeout` (seconds) are per request.
    """

    url: str
    folder: str = ""
    retries: int = 5
    timeout: float = 60.0
    kind: Literal["searxng"] = "searxng"

    def __post_init__(self) -> None:
        _check_url(self.url, self.kind)


@dataclasses.dataclass(frozen=True)
class SerperIndex:
    """Google's results from serper.dev; `url` replaces its address, `folder` caches its results.

    `retries` and `timeout` (seconds) are per request.
    """

    url: str = ""
    folder: str = ""
    retries: int = 5
    timeout: float = 60.0
    kind: Literal["serper"] = "serper"


def _check_url(url: str, kind: str) -> None:
    # A required field may still be empty, for example from an unset shell variable.
    if not url:
        raise UserError(
            f"index.url is empty, but index.kind {kind} asks a server: give its address, such as "
            "--config.index.url=http://HOST:PORT"
        )


ServerIndex = RemoteIndex | SearxngIndex | SerperIndex
# The first member of a union is the kind of a section without the key `kind`.
Index = VectorIndex | RemoteIndex | SearxngIndex | SerperIndex


@dataclasses.dataclass(frozen=True)
class WorldReaderConfig:
    """The rule-based reader of the synthetic corpus.

    Fields:
      max_documents: documents that it reads; later ones of a prompt are ignored.
      noise: the probability that one irrelevant document distracts it.
      confusion: the same for a document with the requested relation of a similarly named entity.
    """

    max_documents: int = 5
    noise: float = 0.1
    confusion: float = 0.35
    kind: Literal["world_reader"] = "world_reader"


@dataclasses.dataclass(frozen=True)
class LocalLLMConfig:
    """A model on this machine's devices.

    Fields:
      model: a Hugging Face folder, or `tiny` for the policy that ships with the package.
      int8: eight-bit weights (needs Qwix). A policy in training keeps its own precision: the same
        weights must sample and score.
      dtype: the dtype of the weights and of the computation.
      thinking: whether a reply may begin with a think block, as `thinking` for policies. The block
        counts for the maximum length of a reply and is removed before the reply is used.
    """

    model: str = "tiny"
    int8: bool = False
    dtype: Dtype = "float32"
    thinking: Thinking = "off"
    kind: Literal["local"] = "local"


@dataclasses.dataclass(frozen=True)
class OpenAIConfig:
    """A model behind an OpenAI-compatible server; see `llm/openai.py`.

    Fields:
      model: the name of the model on the server.
      base_url: the address of the server; None: OpenAI's.
      concurrency: requests in flight at once.
      retries: attempts after a failed request.
      timeout: seconds per request.
      extra_body: further fields of each request's JSON body; None removes a field.
    """

    model: str
    base_url: str | None = None
    concurrency: int = 32
    retries: int = 5
    timeout: float = 60.0
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: Literal["openai"] = "openai"


@dataclasses.dataclass(frozen=True)
class NoLLMConfig:
    """No frozen language model: for systems that never ask one, and for a run without a judge."""

    kind: Literal["none"] = "none"


LLM = WorldReaderConfig | LocalLLMConfig | OpenAIConfig | NoLLMConfig

SECTIONS: Mapping[str, Any] = {"index": Index, "llm": LLM, "judge": LLM, "writer": LLM}


def drop_unread(config: dict[str, Any], overridden: Collection[str]) -> None:
    """Removes keys of another kind from the sections whose `kind` was overridden.

    The keys of a config file belong to the kind in that file. They mean nothing once the command
    line selects another kind.

    Args:
      config: the values of a config, changed in place.
      overridden: the dotted keys that the command line sets; these are never removed, so that
        one which the kind does not read is reported.
    """
    for name, section in _sections(config):
        if f"{name}.kind" in overridden:
            for key in _unread(name, section):
                # With dots at the end, `llm.model` does not match `llm.model_name`.
                if not any(f"{path}.".startswith(f"{name}.{key}.") for path in overridden):
                    del section[key]


def drop_defaults(config: dict[str, Any]) -> None:
    """Removes keys of another kind that are unset or at their default.

    One dataclass held the keys of all kinds before, so that older configs may name such keys.
    """
    for name, section in _sections(config):
        # Any other value was set on purpose: `schema.build` reports it.
        unread = _unread(name, section)
        for key in [key for key in unread if section[key] in (None, "", unread[key])]:
            del section[key]


def _sections(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    sections = [(name, config.get(name)) for name in SECTIONS]
    return [(name, section) for name, section in sections if isinstance(section, dict)]


def _unread(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a section that its kind does not read but another does, and their defaults."""
    kinds = kinds_of(SECTIONS[name])
    own = kinds.get(section.get("kind", next(iter(kinds))))
    # An unknown kind is reported by `schema.build`, with the valid ones.
    if own is None:
        return {}
    read = {field.name for field in dataclasses.fields(own)}
    others = [field for kind in kinds.values() for field in dataclasses.fields(kind)]
    return {f.name: _default(f) for f in others if f.name in section.keys() - read}


def _default(field: Any) -> Any:
    factory = field.default_factory
    # A dataclass stores the default of a mutable field as a factory.
    return field.default if factory is dataclasses.MISSING else factory()
