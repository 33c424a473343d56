"""Kinds of a config's section `index`, each a dataclass with exactly the keys that it reads.

The key `kind` selects one (`config.schema.convert`); a key that this one does not read is an error.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from jax_ragrl.config.ranges import Count, Natural, NotNegative, Positive, Share
from jax_ragrl.config.schema import check_scheme, is_http, local, one_of
from jax_ragrl.errors import UserError

HASHED_WORDS = "hashed"  # the encoder of hashed words
KINDS, INT8 = ("exact", "scann"), "int8"
# Of vectors: bfloat16 halves the bytes at about equal recall, int8 quarters those on the devices.
VectorDtype = Literal["float32", "bfloat16", "int8"]
DTYPES = get_args(VectorDtype)


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
    recall: Share = 0.0

    def __post_init__(self) -> None:
        # Checked here, because the encoding of a corpus may take hours before the folder is used.
        if self.folder:
            local(self.folder)
        check_settings(self.kind, self.dtype, self.recall)


def check_settings(kind: str, dtype: str, recall: float) -> None:
    """Raises `UserError` if an index of vectors cannot have a kind, a dtype or a recall."""
    one_of("index kind", kind, KINDS)
    one_of("index dtype", dtype, DTYPES)
    if dtype == INT8 and kind != "exact":
        raise UserError(
            f"index dtype is int8, but the index kind is {kind}, which has its own codes: use "
            "the kind exact, or the dtype bfloat16"
        )
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
    "english", "danish", "dutch", "french", "german", "italian", "norwegian", "portuguese",
    "russian", "spanish", "swedish", "turkish", "none",
]  # fmt: skip


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
    k1: NotNegative = 1.5
    b: Share = 0.75
    method: Literal["lucene", "robertson", "atire", "bm25l", "bm25+"] = "lucene"
    folder: str = ""

    def __post_init__(self) -> None:
        if self.folder:
            local(self.folder)


@dataclasses.dataclass(frozen=True)
class RemoteIndex:
    """A search server (`retrieval/remote.py`); it has its own corpus.

    Fields:
      url: the address of the server.
      retries: attempts after a failed request.
      timeout: seconds per try, to the last byte of the reply.
    """

    url: str
    retries: Natural = 5
    timeout: Positive = 60.0
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
    retries: Natural = 5
    timeout: Positive = 60.0
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
    retries: Natural = 5
    timeout: Positive = 60.0
    kind: Literal["serper"] = "serper"


def _check_url(url: str, kind: str) -> None:
    # A required field may still be empty, for example from an unset shell variable.
    if not url:
        raise UserError(
            f"index.url is empty, but index.kind {kind} asks a server: give its address, such as "
            "--config.index.url=http://HOST:PORT"
        )
    check_scheme("index.url", url)


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
    weights: tuple[Positive, ...] = ()
    rerank: str = ""
    candidates: Count = 100
    folder: str = ""

    def __post_init__(self) -> None:
        if self.folder:
            local(self.folder)
        if not self.retrievers:
            raise UserError("index.retrievers is empty: give at least one retriever, such as bm25")
        if len(self.weights) not in (0, len(self.retrievers)):
            raise UserError(
                f"index.weights is {self.weights}: give one weight for each of the "
                f"{len(self.retrievers)} retrievers, or none"
            )
        _ = self.sections  # a wrong word is reported now

    @property
    def sections(self) -> tuple[SingleIndex, ...]:
        """The retrievers, with each word in the form of a section."""
        return tuple(
            parse_retriever(part) if isinstance(part, str) else part for part in self.retrievers
        )


@dataclasses.dataclass(frozen=True)
class OwnIndex:
    """A retriever of one's own.

    Fields:
      retriever: `module:name` of a function or class. It is called with the corpus and returns a
        `retrieval.base.Retriever`.
      kind: `own`.
    """

    retriever: str
    kind: Literal["own"] = "own"


Index = (
    VectorIndex | BM25Index | RemoteIndex | SearxngIndex | SerperIndex | PipelineIndex | OwnIndex
)


def parse_retriever(text: str) -> SingleIndex:
    """Parses a retriever that is one word, see `PipelineIndex`; `UserError` if it is empty."""
    name, _, url = text.partition("@")
    if name == "searxng":
        return SearxngIndex(url)
    if name == "serper":
        return SerperIndex(url)
    if is_http(text):
        return RemoteIndex(text)
    return parse_local_index(text)


def parse_local_index(text: str) -> LocalIndex:
    """Parses a local index, `bm25` or an encoder; `UserError` if the word is empty."""
    if not text:
        raise UserError("a retriever is empty: give bm25, hashed, minilm or the folder of a model")
    return BM25Index() if text == "bm25" else VectorIndex(text)
