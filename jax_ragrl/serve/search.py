"""HTTP server of a retriever, in the form of Search-R1's and verl's (Jin et al. 2025).

  POST /retrieve   {"queries": [...], "topk": 3, "return_scores": true}
  GET  /health     the corpus; healthy once the first search has returned

Queries that arrive during a search join the next one. `retrieval.remote.RemoteRetriever` is the
client. The server has no authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.base import Retriever, check_depth, search_pages
from jax_ragrl.retrieval.remote import to_document
from jax_ragrl.serve import bodies
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.http import (
    Limits,
    check_limits,
    listen,
    make_application,
    result_or_raise,
    results,
    unavailable,
)
from jax_ragrl.serve.replies import error_message
from jax_ragrl.types import Hits

LIMITS = Limits(batch=256, waiting=2 * bodies.MAX_QUERIES)  # queries
TOP_K = 3  # of requests that name none; Search-R1's default
SECONDS = 60.0  # the patience of `RemoteRetriever`, after which nobody waits for the reply
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
        self.searches: Batcher[tuple[str, int], Hits] = Batcher(
            self._search, limits.batch, limits.waiting
        )

    def close(self) -> None:
        """Returns when all accepted requests are processed."""
        self.searches.close()

    def _search(self, requests: Sequence[tuple[str, int]]) -> list[Hits | Exception]:
        return [*search_pages(self.retriever, [(query, k, 0) for query, k in requests])]

    async def retrieve(self, request: Request) -> JSONResponse:
        """The documents of each query, best first, with scores if requested."""
        try:
            # Leaving the block cancels the queries that wait, so that no thread searches them.
            async with asyncio.timeout(self.seconds):
                body = await bodies.read_json(request)
                requests, with_scores = bodies.parse_search_request(body, self.top_k)
                hits = [result_or_raise(x) for x in await results(self.searches, requests)]
        except TimeoutError:
            reason = f"this took longer than {self.seconds:g} seconds"
            raise unavailable(self.searches, reason) from None
        return JSONResponse({"result": [documents(x, with_scores) for x in hits]})

    def describe(self) -> dict[str, Any]:
        """Returns the fields of `/health` about the retriever."""
        corpus = getattr(self.retriever, "corpus", None)
        return {
            "corpus": self.retriever.fingerprint,
            "passages": None if corpus is None else len(corpus),
        }


def documents(hits: Hits, with_scores: bool) -> list[dict[str, Any]]:
    """Returns the hits of one query as values for JSON."""
    values: list[dict[str, Any]] = [{**to_document(passage)} for passage in hits.passages]
    if not with_scores:
        return values
    pairs = zip(values, hits.scores, strict=True)
    return [{"document": document, "score": score} for document, score in pairs]


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
        (self.warmup,) = self.searches.submit([WARMUP])

    async def health(self, request: Request) -> JSONResponse:
        """The retriever; status 503 until the first search has returned."""
        failure = self.warmup.exception() if self.warmup.done() else None
        ready = self.warmup.done() and failure is None
        body = {"ready": ready, **self.describe(), "waiting": len(self.searches)}
        if failure is not None:
            # Retry: a server that the retriever asks may be available again.
            body["failure"] = error_message(failure)
            with contextlib.suppress(queue.Full):
                (self.warmup,) = self.searches.submit([WARMUP])
        return JSONResponse(body, 200 if ready else 503)


def application(
    retriever: Retriever,
    top_k: int = TOP_K,
    seconds: float | None = SECONDS,
    limits: Limits = LIMITS,
) -> Starlette:
    """Returns the ASGI application of a retriever.

    Args:
      retriever: any retriever.
      top_k: number of passages for requests that name none.
      seconds: deadline of a request.
      limits: max queries per search, and max queued queries.

    Raises:
      UserError: a limit allows no request.
    """
    check_depth(top_k)
    check_limits(limits)
    if seconds is not None and not seconds > 0:
        raise UserError(f"a deadline of {seconds:g} seconds allows no request: give more than 0")
    server = RetrieverServer(retriever, top_k, seconds, limits)
    routes = [
        Route("/retrieve", server.retrieve, methods=["POST"]),
        Route("/health", server.health),
    ]
    return make_application(routes, server.close)


def serve(
    retriever: Retriever,
    host: str,
    port: int,
    top_k: int = TOP_K,
    seconds: float | None = SECONDS,
    limits: Limits = LIMITS,
) -> None:
    """Serves a retriever until SIGTERM or SIGINT.

    Args:
      retriever: any retriever.
      host: bind address.
      port: TCP port; 0 = any free port.
      top_k: number of passages for requests that name none.
      seconds: deadline of a request.
      limits: max queries per search, and max queued queries.

    Raises:
      UserError: the address is not available, or a limit allows no request.
    """
    listen(lambda: application(retriever, top_k, seconds, limits), "the retriever", host, port)
