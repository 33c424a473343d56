"""Web search as a retriever: passages are titles and snippets of a search engine's results.

C-3PO evaluates its policies in this way (Chen et al. 2025, table 2: Google on FreshQA and
MultiHop-RAG).
"""

from __future__ import annotations

import itertools
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import EffectError, UserError, redacted
from jax_ragrl.json_text import loads
from jax_ragrl.retrieval.base import check_depth
from jax_ragrl.retrieval.http import RefusedError, RetryingClient
from jax_ragrl.retrieval.trec import by_rank
from jax_ragrl.runtime.jsonl import append_row, filter_rows, read_rows
from jax_ragrl.runtime.servers import UnavailableError, read_key
from jax_ragrl.types import Hits, Passage

PATH = "/search"
CONCURRENCY = 8  # requests in flight


Read = Callable[[bytes], list[Passage]]


def _serper(server: RetryingClient, query: str, page: int, key: str, read: Read) -> list[Passage]:
    return server.post(PATH, {"q": query, "page": page}, read, key=key)


def _searxng(server: RetryingClient, query: str, page: int, key: str, read: Read) -> list[Passage]:
    del key
    return server.send("GET", PATH, read, params={"q": query, "format": "json", "pageno": page})


class Engine(NamedTuple):
    """A search API. Hits have the field `title`; `address` and `text` name two further fields."""

    url: str  # empty for an engine that users host themselves
    key: str  # environment variable of the user's API key; empty for an engine without keys
    # requests a page, counted from 1
    ask: Callable[[RetryingClient, str, int, str, Read], list[Passage]]
    hits: str  # field of a reply that lists the hits
    address: str
    text: str
    advice: str  # possible causes of a refusal


ENGINES = {
    # Google's results, from serper.dev.
    "serper": Engine(
        *("https://google.serper.dev", "SERPER_API_KEY", _serper, "organic", "link", "snippet"),
        "is SERPER_API_KEY right, and is there credit left?",
    ),
    # docs.searxng.org/dev/search_api
    "searxng": Engine(
        *("", "", _searxng, "results", "url", "content"),
        "does its settings.yml list json under search.formats?",
    ),
}


class WebRetriever:
    """Queries a search engine; the id of a passage is its address, the score is 1 / rank.

    Each page of hits is requested once, also for the siblings of a tree. With a `folder`, of which
    each process `writer` has its file, this holds for a resumed run too.

    Raises:
      UserError: an unknown engine, no address, or no key in the environment.
    """

    def __init__(
        self,
        engine: str,
        url: str = "",
        folder: pathlib.Path | None = None,
        *,
        writer: int = 0,
        retries: int = 5,
        timeout: float = 60.0,
        pause: float = 0.5,
    ) -> None:
        one_of("search engine", engine, ENGINES)
        self._engine = ENGINES[engine]
        self._key = read_key(self._engine.key)
        if self._engine.key and not self._key:
            raise UserError(f"{engine} needs an API key: set {self._engine.key}")
        address = (url or self._engine.url).rstrip("/").removesuffix(PATH)
        self.fingerprint = redacted(address)
        self._server = RetryingClient(address, retries, timeout, pause)
        self._outage = ""  # the error of an unavailable engine, within one search
        self._pages: dict[tuple[str, int], list[Passage]] = {}
        self._file, self._lock = None, threading.Lock()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        # Each process reads the pages of all, and appends to a file of its own.
        self._file = folder / f"{engine}-{writer}.jsonl"
        # Removes a line that a killed run left incomplete: a new row would be appended to it.
        filter_rows(self._file, lambda row: True)
        for file in sorted(folder.glob(f"{engine}-*.jsonl")):
            for row in read_rows(file):
                self._pages[row["query"], row["page"]] = [Passage(*hit) for hit in row["hits"]]

    def search(self, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
        """Returns up to `k` hits per query.

        A query that failed has an `EffectError`, as have all remaining queries once the engine was
        unavailable in all tries.
        """
        check_depth(k)
        self._outage = ""
        distinct = list(dict.fromkeys(queries))
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            # Threads, because requests wait for the network and not for the processor.
            results = pool.map(lambda q: self._find(q, k), distinct)
            hits_of = dict(zip(distinct, results, strict=True))
        return [hits_of[query] for query in queries]

    def _find(self, query: str, k: int) -> Hits | EffectError:
        """Requests pages until there are `k` hits, or a page has no new ones."""
        passages: dict[str, Passage] = {}
        try:
            for page in itertools.count(1):
                new = {p.id: p for p in self._page(query, page) if p.id not in passages}
                passages |= new
                # An engine may repeat its last page instead of sending an empty one.
                if not new or len(passages) >= k:
                    break
        except EffectError as error:
            return error
        return by_rank(tuple(passages.values())[:k])

    def _page(self, query: str, page: int) -> list[Passage]:
        if (cached_page := self._pages.get((query, page))) is not None:
            return cached_page
        if self._outage:
            raise EffectError(self._outage)
        place = f"{self.fingerprint}{PATH}"
        try:
            passages = self._engine.ask(
                *(self._server, query, page, self._key),
                lambda content: read_page(content, self._engine, place),
            )
        except UnavailableError as error:
            # The remaining queries of this search fail at once instead of waiting for all retries.
            self._outage = str(error)
            raise
        except RefusedError as error:
            advice = "" if error.status >= 500 else f": {self._engine.advice}"
            why = f"{place} replied to {query[:100]!r} with {error}{advice}"
            raise EffectError(why) from error
        with self._lock:
            self._pages[query, page] = passages
            if self._file is not None:
                append_row(self._file, {"query": query, "page": page, "hits": passages})
        return passages


def read_page(content: bytes, engine: Engine, place: str) -> list[Passage]:
    """Parses the passages of a page of hits; hits without an address are dropped.

    Raises:
      ValueError: a reply of another form.
      EffectError: there are no hits because the engines that SearXNG queries did not respond.
    """
    body = loads(content)
    hits = body.get(engine.hits) if isinstance(body, dict) else None
    if not isinstance(hits, list):
        raise ValueError(f"it has no list {engine.hits!r}")
    if not hits and body.get("unresponsive_engines"):
        engines = str(body["unresponsive_engines"])[:200]
        raise EffectError(f"{place} found nothing, because engines did not respond: {engines}")
    passages = []
    for hit in hits:
        if not isinstance(hit, dict) or not hit.get(engine.address):
            continue
        values = [hit.get(name) or "" for name in (engine.address, "title", engine.text)]
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"the hit {str(hit)[:200]!r} has a field that is no text")
        passages.append(Passage(*values))
    return passages
