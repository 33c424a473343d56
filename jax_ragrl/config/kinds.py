"""Config sections with a `kind`: a retriever's index and a frozen language model.

Each kind is a dataclass with exactly the keys that it reads, and a section is a union of kinds:
`config.schema.build` selects the dataclass by the key `kind`, so that a key which the selected
kind does not read is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jax_ragrl.config.schema import is_http, kinds_of, local
from jax_ragrl.errors import UserError

HASHED_WORDS = "hashed"  # the encoder of hashed words
# A `Literal`, so that `schema.convert` refuses other dtypes when the config is read.
Dtype = Literal["float32", "bfloat16"]
VectorDtype = Literal["float32", "bfloat16", "int8"]
Thinking = Literal["off", "on"]


@dataclasses.dataclass(frozen=True)
class VectorIndex:
    """A vector index of the corpus on this machine.

    Fields:
      encoder: `hashed` (words, without weights), `minilm`, a folder, or `OWNER/NAME` on the Hub.
      kind: `scann` searches approximately, `exact` compares with every passage.
      dtype: the dtype of stored vectors; `int8`, of the kind `exact`, keeps eight bits on the
        devices and scores the best candidates again in float32 from disk.
      folder: the index is opened if it exists there and built there otherwise; empty: the run's
        work folder.
      recall: of the ten nearest passages; ScaNN's search is tuned to reach it, e.g. 0.98, when the
        index is built. 0: not tuned.
    """

    encoder: str = HASHED_WORDS
    kind: Literal["scann", "exact"] = "scann"
    dtype: VectorDtype = "float32"
    folder: str = ""
    recall: float = 0.0

    def __post_init__(self) -> None:
        # Checked here, because the encoding of a corpus may take hours before the folder is used.
        if self.folder:
            local(self.folder)
        check_recall(self.recall, self.kind)
        check_dtype(self.dtype, self.kind)


def check_dtype(dtype: str, kind: str) -> None:
    """Raises `UserError` if a kind of index cannot store its vectors in a dtype."""
    if dtype == "int8" and kind != "exact":
        raise UserError(
            f"index dtype is int8, but the index kind is {kind}, which has its own codes: use "
            "the kind exact, or the dtype bfloat16"
        )


def check_recall(recall: float, kind: str) -> None:
    """Raises `UserError` if a kind of index cannot be tuned for a recall; 0 asks for nothing."""
    if not 0 <= recall <= 1:
        raise UserError(
            f"index recall is {recall}, but it is a share: give a number such as 0.98, or 0"
        )
    if recall and kind != "scann":
        raise UserError(
            f"index recall is {recall}, but the index kind is {kind}, and only scann is tuned for "
            "a recall: leave it out, or use the kind scann"
        )


# The languages of which both stop words and a stemmer exist; see `retrieval.bm25`.
Language = Literal[
    "english",
    "danish",
    "dutch",
    "french",
    "german",
    "italian",
    "norwegian",
    "portuguese",
    "russian",
    "spanish",
    "swedish",
    "turkish",
    "none",
]


@dataclasses.dataclass(frozen=True)
class BM25Index:
    """An index of the words of the corpus on this machine, searched with BM25.

    Fields:
      kind: `bm25`.
      language: the language of stop words and of the stemmer; `none`: every word is kept as it is.
      k1: how much a repeated word counts; 0: as much as one occurrence.
      b: how much long passages are discounted, 0 to 1.
      method: the form of BM25, see Kamphuis et al. 2020.
      folder: the index is opened if it exists there and built there otherwise; empty: the run's
        work folder.
    """

    kind: Literal["bm25"] = "bm25"
    language: Language = "english"
    k1: float = 1.5
    b: float = 0.75
    method: Literal["lucene", "robertson", "atire", "bm25l", "bm25+"] = "lucene"
    folder: str = ""

    def __post_init__(self) -> None:
        if self.folder:
            local(self.folder)
        if not (0 <= self.k1 < math.inf and 0 <= self.b <= 1):
            raise UserError(
                f"index.k1 is {self.k1} and index.b {self.b}: k1 must be at least 0, and b between "
                "0 and 1 (1.5 and 0.75 are usual)"
            )


@dataclasses.dataclass(frozen=True)
class RemoteIndex:
    """A search server (`retrieval/remote.py`); it has its own corpus.

    Fields:
      url: the address of the server.
      retries: attempts after a failed request.
      timeout: seconds per try, to the last byte of the reply.
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

    `retries` are per request, `timeout` (seconds) is per try.
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

    `retries` are per request, `timeout` (seconds) is per try.
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
    _check_scheme("index.url", url)


def _check_scheme(key: str, url: str) -> None:
    """Refuses an address that no client could ask, such as `localhost:8000`."""
    if not is_http(url):
        raise UserError(
            f"{key} is {url!r}, without http:// or https://: give the whole address, such as "
            f"http://{url}"
        )


ServerIndex = RemoteIndex | SearxngIndex | SerperIndex
LocalIndex = VectorIndex | BM25Index
# The first member of a union is the kind of a section without the key `kind`.
SingleIndex = VectorIndex | BM25Index | RemoteIndex | SearxngIndex | SerperIndex
LISTWISE = "llm"  # a reranker that is the frozen language model of the run


@dataclasses.dataclass(frozen=True)
class PipelineIndex:
    """Several retrievers whose hits are fused, a reranker of the hits, or both.

    Fields:
      kind: `pipeline`.
      retrievers: each is a section of another kind, or one word: `bm25`, an encoder (`hashed`,
        `minilm`, a folder), the address of a server, or `ENGINE[@URL]` of a web search.
      fuse: `rrf` adds reciprocal ranks, `weighted` adds scores that are scaled to 0 to 1 per query.
      weights: the weight of each retriever; empty: equal ones.
      rerank: the name or folder of a cross-encoder that scores the first hits again; `llm`: the
        frozen language model of the run orders them; empty: no reranker.
      candidates: the number of hits per retriever that are fused, and of hits that are reranked.
      folder: of the indexes of the retrievers; empty: the run's work folder.
    """

    kind: Literal["pipeline"] = "pipeline"
    retrievers: tuple[str | SingleIndex, ...] = ("bm25",)
    fuse: Literal["rrf", "weighted"] = "rrf"
    weights: tuple[float, ...] = ()
    rerank: str = ""
    candidates: int = 100
    folder: str = ""

    def __post_init__(self) -> None:
        if self.folder:
            local(self.folder)
        if not self.retrievers or self.candidates < 1:
            raise UserError(
                f"index.retrievers is {self.retrievers} and index.candidates {self.candidates}: "
                "give at least one retriever, such as bm25, and one candidate"
            )
        valid = len(self.weights) in (0, len(self.retrievers))
        if not valid or not all(0 < weight < math.inf for weight in self.weights):
            raise UserError(
                f"index.weights is {self.weights}: give one weight above 0 for each of the "
                f"{len(self.retrievers)} retrievers, or none"
            )
        _ = self.sections  # a wrong word is reported now

    @property
    def sections(self) -> tuple[SingleIndex, ...]:
        """The retrievers, with each word in the form of a section."""
        return tuple(
            parse_retriever(part) if isinstance(part, str) else part for part in self.retrievers
        )


Index = VectorIndex | BM25Index | RemoteIndex | SearxngIndex | SerperIndex | PipelineIndex


def parse_retriever(text: str) -> SingleIndex:
    """Parses a retriever that is given as one word, see `PipelineIndex`.

    Raises:
      UserError: the word is empty, or an engine needs its address.
    """
    name, _, url = text.partition("@")
    if name == "searxng":
        return SearxngIndex(url)
    if name == "serper":
        return SerperIndex(url)
    if is_http(text):
        return RemoteIndex(text)
    return parse_local_index(text)


def parse_local_index(text: str) -> LocalIndex:
    """Parses an index on this machine that is given as one word: `bm25`, or an encoder.

    Raises:
      UserError: the word is empty.
    """
    if not text:
        raise UserError("a retriever is empty: give bm25, hashed, minilm or the folder of a model")
    return BM25Index() if text == "bm25" else VectorIndex(text)


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
      model: a model by its name: a folder, a `.gguf` file, `OWNER/NAME`, `tiny` or `smollm2`.
      int8: eight-bit weights (needs Qwix). A policy in training keeps its own precision: the same
        weights must sample and score.
      dtype: the dtype of the weights and of the computation.
      max_tokens: limit on the new tokens of a reply, in addition to that of the request; 0: none.
      thinking: whether a reply may begin with a think block, as `thinking` for policies. The block
        counts for the maximum length of a reply and is removed before the reply is used.
    """

    model: str = "tiny"
    int8: bool = False
    dtype: Dtype = "float32"
    max_tokens: int = 0
    thinking: Thinking = "off"
    kind: Literal["local"] = "local"


@dataclasses.dataclass(frozen=True)
class OpenAIConfig:
    """A model behind an OpenAI-compatible server; see `llm/openai.py`.

    Fields:
      model: the name of the model on the server.
      base_url: the address of the server; None: OpenAI's.
      concurrency: most requests in flight at once. It begins with 4, rises while replies come
        soon, and falls if the server is overloaded (429, 503, time-outs).
      retries: attempts after a failed request.
      timeout: seconds of the first try, to the last byte of the reply; up to 4 times as many after
        a late one.
      extra_body: further fields of each request's JSON body; None removes a field.
      cache: whether replies are stored in the folder of the run (`llm_cache.sqlite`), and equal
        requests are answered from there.
    """

    model: str
    base_url: str | None = None
    concurrency: int = 256
    retries: int = 5
    timeout: float = 60.0
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cache: bool = True
    kind: Literal["openai"] = "openai"

    def __post_init__(self) -> None:
        if self.base_url:
            _check_scheme("base_url", self.base_url)


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
    for name in SECTIONS:
        section = config.get(name)
        if f"{name}.kind" in overridden and isinstance(section, dict):
            for key in _unread(name, section):
                # With dots at the end, `llm.model` does not match `llm.model_name`.
                if not any(f"{path}.".startswith(f"{name}.{key}.") for path in overridden):
                    del section[key]


def _unread(name: str, section: Mapping[str, Any]) -> set[str]:
    """The keys of a section that its kind does not read but another does."""
    kinds = kinds_of(SECTIONS[name])
    own = kinds.get(section.get("kind", next(iter(kinds))))
    # An unknown kind is reported by `schema.build`, with the valid ones.
    if own is None:
        return set()
    read = {field.name for field in dataclasses.fields(own)}
    others = {field.name for kind in kinds.values() for field in dataclasses.fields(kind)}
    return others & section.keys() - read
