"""HTTP server of a retriever, in the form of Search-R1's and verl's (Jin et al. 2025).

  POST /retrieve   {"queries": [...], "topk": 3, "return_scores": true}
  GET  /health     the corpus; healthy once the first search has returned
  POST /mcp        a tool for agents, see `serve/mcp.py`, if asked for

Queries that arrive during a search join the next one. `retrieval.remote.RemoteRetriever` is the
client.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from jax_ragrl.errors import EffectError
from jax_ragrl.retrieval.base import Retriever, check_depth, search_pages
from jax_ragrl.retrieval.remote import to_document
from jax_ragrl.serve import bodies, http, mcp
from jax_ragrl.serve.access import SETTINGS, Settings
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.http import Limits
from jax_ragrl.serve.replies import error_message
from jax_ragrl.types import Hits

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

# Of queries. `RemoteRetriever` waits as long, after which nobody waits for the reply.
LIMITS = Limits(batch=256, waiting=2 * bodies.MAX_QUERIES, seconds=60.0)
TOP_K = 3  # of requests that name none; Search-R1's default
PART = 32  # queries per part of a reply
WARMUP = ("warm-up", TOP_K)


class SearchService:
    """The endpoints of a retriever; one thread searches.

    Args:
      retriever: any retriever.
      top_k: number of passages for requests that name none.
      limits: max queries per search, max queued queries, and the deadline of a request.
    """

    def __init__(self, retriever: Retriever, top_k: int, limits: Limits) -> None:
        self.retriever, self.top_k, self.limits = retriever, top_k, limits

        def search(requests: Sequence[tuple[str, int]]) -> list[Hits | Exception]:
            return [*search_pages(retriever, [(query, k, 0) for query, k in requests])]

        self.searches = Batcher(search, limits.batch, limits.waiting)

    async def retrieve(self, request: Request) -> StreamingResponse:
        """The documents of each query, best first, with scores if requested."""
        # More than the queue holds would never fit: "try again later" (503) would be untrue.
        limit = min(bodies.MAX_QUERIES, self.limits.waiting)
        async with http.deadline(self.limits.seconds, self.searches):
            body = await bodies.read_json(request)
            requests, with_scores = bodies.parse_search_request(body, self.top_k, limit)
            outcomes = await http.results(self.searches, requests, request)
        hits = hits_or_raise(outcomes)
        return StreamingResponse(_parts(hits, with_scores), media_type="application/json")

    def tools(self) -> MCPServer:
        return mcp.tool_server(self.searches, self.top_k, self.limits.seconds)

    def describe(self) -> dict[str, Any]:
        """Returns the fields of `/health` about the retriever."""
        corpus = getattr(self.retriever, "corpus", None)
        passages = None if corpus is None else len(corpus)
        return {"corpus": self.retriever.fingerprint, "passages": passages}


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

    def encode(one: Hits) -> bytes:
        values: list[Any] = [*map(to_document, one.passages)]
        if with_scores:
            pairs = zip(values, one.scores, strict=True)
            values = [{"document": document, "score": score} for document, score in pairs]
        return json.dumps(values, ensure_ascii=False).encode(errors="replace")

    # One call per query: other threads cannot run during a call of the encoder.
    return b",".join(map(encode, hits))


def application(
    retriever: Retriever, top_k: int = TOP_K, limits: Limits = LIMITS, settings: Settings = SETTINGS
) -> Starlette:
    """Returns the ASGI application of a retriever, see `serve`."""
    check_depth(top_k)
    http.check_limits(limits)
    service = SearchService(retriever, top_k, limits)
    # Compiles the programs of small searches, and shows whether the retriever works.
    warmup = http.Warmup("the retriever", service.searches, WARMUP)

    async def health(request: Request) -> JSONResponse:
        return warmup.health(request, service.describe())

    tools, running = mcp.over_http(service.tools()) if settings.mcp else ((), None)
    retrieve = Route("/retrieve", service.retrieve, methods=["POST"])
    routes = [retrieve, Route("/health", health), *tools]
    return http.make_application(routes, {"searches": service.searches}, settings, running)


def serve(
    retriever: Retriever, top_k: int = TOP_K, limits: Limits = LIMITS, settings: Settings = SETTINGS
) -> None:
    """Serves a retriever until SIGTERM or SIGINT.

    Raises:
      UserError: the address is not available, or a limit allows no request.
    """
    if settings.mcp == mcp.STDIO:
        return mcp.over_stdio(SearchService(retriever, top_k, limits).tools())
    make = functools.partial(application, retriever, top_k, limits, settings)
    http.listen(make, "the retriever", settings)
