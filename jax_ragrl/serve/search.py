"""HTTP server of a retriever, in the form of Search-R1's and verl's (Jin et al. 2025).

  POST /retrieve   {"queries": [...], "topk": 3, "return_scores": true}
  GET  /health     the corpus; healthy once the first search has returned

Queries that arrive during a search join the next one. `retrieval.remote.RemoteRetriever` is the
client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import queue
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from jax_ragrl.errors import EffectError
from jax_ragrl.retrieval.base import Retriever, check_depth, search_pages
from jax_ragrl.retrieval.remote import to_document
from jax_ragrl.serve import bodies
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.guard import Guard
from jax_ragrl.serve.http import (
    GRACE,
    SETTINGS,
    Limits,
    Settings,
    announce,
    check_limits,
    check_seconds,
    deadline,
    listen,
    make_application,
    note,
    results,
)
from jax_ragrl.serve.replies import error_message
from jax_ragrl.types import Hits

LIMITS = Limits(batch=256, waiting=2 * bodies.MAX_QUERIES)  # queries
TOP_K = 3  # of requests that name none; Search-R1's default
SECONDS = 60.0  # the patience of `RemoteRetriever`, after which nobody waits for the reply
PART = 32  # queries per part of a reply
WARMUP = ("warm-up", TOP_K)


class SearchService:
    """The endpoints of a retriever; one thread searches.

    Args:
      retriever: any retriever.
      top_k: number of passages for requests that name none.
      seconds: deadline of a request, counted from its first byte; None waits for ever.
      limits: max queries per search, and max queued queries.
    """

    def __init__(
        self,
        retriever: Retriever,
        top_k: int = TOP_K,
        seconds: float | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.retriever, self.top_k, self.seconds = retriever, top_k, seconds
        # More than the queue holds would never fit: "try again later" (503) would be untrue.
        self.max_queries = min(bodies.MAX_QUERIES, limits.waiting)
        self.searches: Batcher[tuple[str, int], Hits] = Batcher(
            self._search, limits.batch, limits.waiting
        )

    def close(self) -> bool:
        """Returns when all accepted requests are processed; false if the last search hangs."""
        return self.searches.close(GRACE)

    def _search(self, requests: Sequence[tuple[str, int]]) -> list[Hits | Exception]:
        return [*search_pages(self.retriever, [(query, k, 0) for query, k in requests])]

    async def retrieve(self, request: Request) -> StreamingResponse:
        """The documents of each query, best first, with scores if requested."""
        async with deadline(self.seconds, self.searches):
            body = await bodies.read_json(request)
            requests, with_scores = bodies.parse_search_request(body, self.top_k, self.max_queries)
            note(request, "queries", [query for query, _ in requests])
            outcomes = await results(self.searches, requests, request)
        hits = hits_or_raise(outcomes)
        return StreamingResponse(_parts(hits, with_scores), media_type="application/json")

    def describe(self) -> dict[str, Any]:
        """Returns the fields of `/health` about the retriever."""
        corpus = getattr(self.retriever, "corpus", None)
        return {
            "corpus": self.retriever.fingerprint,
            "passages": None if corpus is None else len(corpus),
        }


def hits_or_raise(hits: Sequence[Hits | BaseException]) -> list[Hits]:
    """Returns the hits of all queries of a request.

    Raises:
      HTTPException: a search failed. Clients divide a request after status 500, so that the query
        fails alone; if all of several failed, status 502 says that no part would succeed.
    """
    failures = [x for x in hits if isinstance(x, BaseException)]
    if failures:
        is_outage = 1 < len(hits) == sum(isinstance(x, EffectError) for x in failures)
        raise HTTPException(502 if is_outage else 500, f"this failed: {error_message(failures[0])}")
    return [x for x in hits if isinstance(x, Hits)]


async def _parts(hits: Sequence[Hits], with_scores: bool) -> AsyncIterator[bytes]:
    """Yields the reply to a request as JSON, in parts, so that a large one is never in memory."""
    yield b'{"result":['
    for start in range(0, len(hits), PART):
        part = hits[start : start + PART]
        # In a thread, because a part must not hold up the event loop.
        yield (b"," if start else b"") + await asyncio.to_thread(_encode, part, with_scores)
    yield b"]}"


def _encode(hits: Sequence[Hits], with_scores: bool) -> bytes:
    """The results of some queries, as JSON."""
    # One call per query: other threads cannot run during a call of the encoder.
    texts = (json.dumps(documents(x, with_scores), ensure_ascii=False) for x in hits)
    return b",".join(text.encode(errors="replace") for text in texts)


def documents(hits: Hits, with_scores: bool) -> list[dict[str, Any]]:
    """Returns the hits of one query as values for JSON."""
    values: list[dict[str, Any]] = [{**to_document(passage)} for passage in hits.passages]
    if not with_scores:
        return values
    pairs = zip(values, hits.scores, strict=True)
    return [{"document": document, "score": score} for document, score in pairs]


def health_reply(request: Request, body: dict[str, Any]) -> JSONResponse:
    """Returns the reply of `/health`; without an API key, only whether the server is ready."""
    is_authorized = request.scope["state"].get("is_authorized", True)
    visible = body if is_authorized else {"ready": body["ready"]}
    return JSONResponse(visible, 200 if body["ready"] else 503)


class RetrieverServer(SearchService):
    """A `SearchService` with its own `/health`, which a first search precedes."""

    def __init__(
        self,
        retriever: Retriever,
        top_k: int = TOP_K,
        seconds: float | None = SECONDS,
        limits: Limits = LIMITS,
    ) -> None:
        super().__init__(retriever, top_k, seconds, limits)
        # Compiles the programs of small searches, and shows whether the retriever works.
        (warmup,) = self.searches.submit([WARMUP])
        self.warmup = announce("the retriever", warmup)

    async def health(self, request: Request) -> JSONResponse:
        """The retriever; status 503 until the first search has returned."""
        failure = self.warmup.exception() if self.warmup.done() else None
        ready = self.warmup.done() and failure is None
        body = {"ready": ready, **self.describe(), "waiting": len(self.searches)}
        if failure is not None:
            # Retry: a server that the retriever asks may be available again.
            body["failure"] = error_message(failure)
            with contextlib.suppress(queue.Full):
                (warmup,) = self.searches.submit([WARMUP])
                self.warmup = announce("the retriever", warmup, again=True)
        return health_reply(request, body)


def application(
    retriever: Retriever,
    top_k: int = TOP_K,
    seconds: float | None = SECONDS,
    limits: Limits = LIMITS,
    guard: Guard | None = None,
    settings: Settings = SETTINGS,
) -> Starlette:
    """Returns the ASGI application of a retriever.

    Args:
      retriever: any retriever.
      top_k: number of passages for requests that name none.
      seconds: deadline of a request.
      limits: max queries per search, and max queued queries.
      guard: who may ask; None admits every client.
      settings: bounds on bodies, and the access log.

    Raises:
      UserError: a limit allows no request.
    """
    check_depth(top_k)
    check_limits(limits)
    check_seconds(seconds)
    server = RetrieverServer(retriever, top_k, seconds, limits)
    routes = [
        Route("/retrieve", server.retrieve, methods=["POST"]),
        Route("/health", server.health),
    ]
    queues = {"searches": server.searches}
    return make_application(routes, server.close, queues, guard, settings)


def serve(
    retriever: Retriever,
    host: str,
    port: int,
    top_k: int = TOP_K,
    seconds: float | None = SECONDS,
    limits: Limits = LIMITS,
    settings: Settings = SETTINGS,
) -> None:
    """Serves a retriever until SIGTERM or SIGINT.

    Args:
      retriever: any retriever.
      host: bind address.
      port: TCP port; 0 = any free port.
      top_k: number of passages for requests that name none.
      seconds: deadline of a request.
      limits: max queries per search, and max queued queries.
      settings: bounds on connections, and who may ask.

    Raises:
      UserError: the address is not available, or a limit allows no request.
    """
    guard = Guard(settings.access, host)
    make = functools.partial(application, retriever, top_k, seconds, limits, guard, settings)
    listen(make, "the retriever", host, port, settings)
