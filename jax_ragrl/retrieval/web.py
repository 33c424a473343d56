"""The web as a corpus: titles and snippets of the pages that a search engine finds.

So are C-3PO's policies tested on questions of today (Chen et al. 2025, table 2: Google on FreshQA
and MultiHop-RAG).
"""

from __future__ import annotations

import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx2

from jax_ragrl.config.schema import one_of
from jax_ragrl.corpus.formats.files import loads
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import check_depth
from jax_ragrl.retrieval.http import Patient, unless_refused
from jax_ragrl.runtime.jsonl import append, keep_rows, rows_of
from jax_ragrl.types import Hits, Passage

PATH = "/search"
AT_ONCE = 8  # requests in flight


def _serper(server: Patient, query: str, page: int, key: str) -> httpx2.Response:
    return server.post(PATH, {"q": query, "page": page}, key=key)


def _searxng(server: Patient, query: str, page: int, key: str) -> httpx2.Response:
    del key
    return server.ask("GET", PATH, params={"q": query, "format": "json", "pageno": page})


class Engine(NamedTuple):
    """One search API. A hit has a title; `address` and `text` name its other two fields."""

    url: str  # empty where everyone runs one's own
    key: str  # the environment variable that holds the user's key; empty where none is needed
    ask: Callable[[Patient, str, int, str], httpx2.Response]  # for a page, counted from 1
    hits: str  # the field of a reply that lists them
    address: str
    text: str
    refused: str  # what to look at then


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


class Pages:
    """Pages of hits by query and number; with a folder, also those that were found before."""

    def __init__(self, folder: pathlib.Path | None, engine: str, writer: int) -> None:
        """Each of several processes is a `writer` of its own, and reads what any has written."""
        self._pages: dict[tuple[str, int], list[Passage]] = {}
        self._file, self._lock = None, threading.Lock()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{engine}-{writer}.jsonl"
        keep_rows(self._file, lambda row: True)
        for file in sorted(folder.glob(f"{engine}-*.jsonl")):
            for row in rows_of(file):
                self._pages[row["query"], row["page"]] = [Passage(*hit) for hit in row["hits"]]

    def get(self, query: str, page: int) -> list[Passage] | None:
        """The passages of a page that is known."""
        return self._pages.get((query, page))

    def put(self, query: str, page: int, passages: list[Passage]) -> None:
        """Keeps a page."""
        with self._lock:
            self._pages[query, page] = passages
            if self._file is not None:
                append(self._file, {"query": query, "page": page, "hits": passages})


class WebRetriever:
    """Asks a search engine; a page's address is the id of its passage, 1 / rank the score.

    No page of hits is asked for twice: not by siblings of a tree, nor, with a `folder`, by a run
    that goes on, which so sees what it saw before.

    Args:
      engine: a name in `ENGINES`.
      url: of the service; empty for the engine's own.
      folder: where hits are kept; None keeps them in memory.
      writer: the number of this process, of several that share a folder.
      retries, timeout, pause: see `retrieval.http.Patient`.

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
        self._key = os.environ.get(self._engine.key, "").strip()  # files end in a newline
        if self._engine.key and not self._key:
            raise UserError(f"{engine} asks for a key: set {self._engine.key}")
        if not (self._key.isascii() and self._key.isprintable()):  # what no header may hold
            raise UserError(f"{self._engine.key} holds signs that no key has: copy it again")
        self.fingerprint = (url or self._engine.url).rstrip("/").removesuffix(PATH)
        self._server = Patient(self.fingerprint, retries, timeout, pause)
        self._pages = Pages(folder, engine, writer)
        self._known = False  # whether it ever sent a page; one that was kept tells nothing of it
        self._away = ""  # what it said when it stayed away, in this search

    def search(self, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
        """The first `k` pages for each query, fewer if there are no more.

        An `EffectError` stands in place of what was not found: for a query, or for all that were
        left when the engine stayed away through all tries.

        Raises:
          UserError: k is below 1; an engine that never sent a page refused, or sent something else:
            then the address, or the key, is to blame.
        """
        check_depth(k)
        self._away = ""
        distinct = list(dict.fromkeys(queries))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(zip(distinct, pool.map(lambda q: self._find(q, k), distinct), strict=True))
        return unless_refused([found[query] for query in queries], self._known)

    def _find(self, query: str, k: int) -> Hits | UserError | EffectError:
        """The hits of a query, page after page until there are enough, or nothing is new."""
        passages: dict[str, Passage] = {}
        try:
            for page in itertools.count(1):
                new = {p.id: p for p in self._page(query, page) if p.id not in passages}
                passages |= new
                if not new or len(passages) >= k:
                    break
        except (UserError, EffectError) as error:
            return error
        first = tuple(passages.values())[:k]
        return Hits(first, tuple(1 / rank for rank in range(1, len(first) + 1)))

    def _page(self, query: str, page: int) -> list[Passage]:
        """One page of hits, asked for unless it is known."""
        if (known := self._pages.get(query, page)) is not None:
            return known
        if self._away:
            raise EffectError(self._away)
        try:
            reply = self._engine.ask(self._server, query, page, self._key)
        except EffectError as error:
            self._away = str(error)
            raise
        passages = self._read(reply, query)
        self._known = True
        self._pages.put(query, page, passages)
        return passages

    def _read(self, reply: httpx2.Response, query: str) -> list[Passage]:
        """The passages of a reply; a hit without an address is none."""
        status, text = reply.status_code, reply.text
        told = f"{self.fingerprint}{PATH} replied to {query[:100]!r} with {status}, {text[:200]!r}"
        if status >= 500:
            raise EffectError(told)
        if place := reply.headers.get("location"):
            raise UserError(f"{told}: it is at {place}")
        if status != 200:
            raise UserError(f"{told}: {self._engine.refused}")
        return read_page(text, self._engine, told)


def read_page(text: str, engine: Engine, told: str) -> list[Passage]:
    """The passages of a page of hits; `told` begins what is said of another form.

    Raises:
      UserError: another form.
      EffectError: there are no hits, because (SearXNG says) none of the engines that it asks came
        back.
    """
    try:
        body = loads(text)
    except ValueError:
        body = None
    hits = body.get(engine.hits) if isinstance(body, dict) else None
    if not isinstance(hits, list):
        raise UserError(f"{told}: it has no list {engine.hits!r}")
    if not hits and body.get("unresponsive_engines"):
        raise EffectError(f"{told}: {body['unresponsive_engines']}")
    return [
        passage(hit, engine) for hit in hits if isinstance(hit, dict) and hit.get(engine.address)
    ]


def passage(hit: Mapping[str, Any], engine: Engine) -> Passage:
    """A hit as a passage; titles and snippets may be missing."""
    title, text = (str(hit.get(name) or "") for name in ("title", engine.text))
    return Passage(str(hit[engine.address]), title, text)
