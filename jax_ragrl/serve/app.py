"""A trained system behind HTTP: what is asked while a rollout runs is answered in the next one.

  POST /answer                {"question": ...} or {"questions": [...]}; with "trace": true, steps
  POST /v1/chat/completions   the OpenAI form, in which the last user message is the question
  POST /retrieve              the index alone, in the form of `retrieval/remote.py`
  GET  /v1/models, /health    what is served; not healthy until its programs are compiled

Answers are those of `evaluate` and `ask`: greedy, one path a question, whatever is asked beside it.
(Where a system samples a language model, seeds are folded from the text, as `ask` does it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import search_pages
from jax_ragrl.retrieval.remote import to_document
from jax_ragrl.serve import bodies
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.replies import Reply, Served, reason, replies, told
from jax_ragrl.types import Hits


class Limits(NamedTuple):
    """How many questions a rollout (and a request) holds at most, and how many may wait."""

    batch: int = 64
    waiting: int = 256


DEFAULT = Limits()
SEARCHES = Limits(256, 2 * bodies.QUERIES)  # of queries
T = TypeVar("T")
R = TypeVar("R")


def serve(served: Served, host: str, port: int, limits: Limits = DEFAULT) -> None:
    """Answers until SIGTERM or SIGINT; then what is queued is finished, and the process exits 0.

    Raises `UserError` for limits that hold nothing and for an address that cannot be listened on.
    """
    if not 1 <= limits.batch <= limits.waiting:
        raise UserError(f"{limits}: a batch is at least 1 question, and the queue at least a batch")
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}): give another --port") from error
    for number in (signal.SIGTERM, signal.SIGINT):
        # Uvicorn takes the signals while it runs, and raises them again when it has finished.
        signal.signal(number, lambda *_: sys.exit(0))
    print(f"ragrl: {served.name} answers at http://{host}:{listener.getsockname()[1]}", flush=True)
    # No logging of its own: to set that up would close the streams of absl's handlers.
    options: dict[str, Any] = {"log_config": None, "log_level": "warning", "lifespan": "on"}
    config = uvicorn.Config(application(served, limits), **options)
    uvicorn.Server(config).run(sockets=[listener])


def application(served: Served, limits: Limits = DEFAULT) -> Starlette:
    """The ASGI application; its lifespan ends when all that was asked is answered."""
    service = Service(served, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    routes = [
        Route("/answer", service.answer, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/retrieve", service.retrieve, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
    ]
    handlers: Mapping[Any, Any] = {HTTPException: _refusal}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _refusal(request: Request, error: HTTPException) -> JSONResponse:
    body = {"error": {"message": error.detail, "code": error.status_code}}
    return JSONResponse(body, error.status_code, error.headers)


class Service:
    """The endpoints, over one thread that rolls questions out, and one that searches beside it."""

    def __init__(self, served: Served, limits: Limits) -> None:
        self.served, self.limits = served, limits
        self.answers: Batcher[str, Reply] = Batcher(lambda t: replies(served, t), *limits)
        self.searches: Batcher[tuple[str, int], Hits] = Batcher(self._search, *SEARCHES)
        (self.warm,) = self.answers.submit([served.warm])

    def close(self) -> None:
        """Returns when all that was asked is answered."""
        self.answers.close()
        self.searches.close()

    def _search(self, requests: Sequence[tuple[str, int]]) -> list[Hits | Exception]:
        pages = [(query, k, 0) for query, k in requests]
        return [*search_pages(self.served.environment.retriever, pages)]

    async def answer(self, request: Request) -> JSONResponse:
        """What became of a question; of several, each by itself."""
        body = await bodies.read(request)
        texts, trace = bodies.asked(body, self.limits.batch)
        found = await _results(self.answers, texts)
        if "question" in body:
            return JSONResponse(told(texts[0], _certain(found[0]), trace))
        each = [told(text, reply, trace) for text, reply in zip(texts, found, strict=True)]
        return JSONResponse({"answers": each})

    async def chat(self, request: Request) -> JSONResponse:
        """A chat completion; `why` beside its message says how the rollout ended."""
        text = bodies.chatted(await bodies.read(request))
        reply = _certain((await _results(self.answers, [text]))[0])
        message = {"role": "assistant", "content": reply.answer or ""}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "why": reply.why}
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = dict(zip(names, (*reply.tokens, sum(reply.tokens)), strict=True))
        now = time.time_ns()
        head = {"id": f"chatcmpl-{now:x}", "object": "chat.completion", "created": now // 10**9}
        return JSONResponse(head | {"model": self.served.name, "choices": [choice], "usage": usage})

    async def retrieve(self, request: Request) -> JSONResponse:
        """The documents of each query, best first, with their scores if asked for."""
        body = await bodies.read(request)
        requests, scored = bodies.searched(body, max(self.served.system.top_k, 1))
        found = [_certain(hits) for hits in await _results(self.searches, requests)]
        result: list[list[Any]] = [[to_document(p) for p in hits.passages] for hits in found]
        if scored:
            result = [
                [{"document": d, "score": s} for d, s in zip(documents, hits.scores, strict=True)]
                for documents, hits in zip(result, found, strict=True)
            ]
        return JSONResponse({"result": result})

    async def models(self, request: Request) -> JSONResponse:
        """The one model there is."""
        model = {"id": self.served.name, "object": "model", "created": 0, "owned_by": "jax_ragrl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> JSONResponse:
        """Whether the first question was answered, with 503 until then, and what is served."""
        retriever = self.served.environment.retriever
        corpus = getattr(retriever, "corpus", None)
        body = {
            "ready": _succeeded(self.warm),
            "system": self.served.name,
            "policy": self.served.policy,
            "corpus": retriever.fingerprint,
            "passages": None if corpus is None else len(corpus),
            "waiting": len(self.answers),
        }
        if self.warm.done() and self.warm.exception():
            body["failure"] = reason(self.warm.exception())
            with contextlib.suppress(queue.Full):
                (self.warm,) = self.answers.submit([self.served.warm])
        return JSONResponse(body, 200 if body["ready"] else 503)


async def _results(batcher: Batcher[T, R], items: Sequence[T]) -> list[R | BaseException]:
    """What became of each item; an exception in place of what failed."""
    try:
        futures = batcher.submit(items)
    except queue.Full:
        later = {"Retry-After": str(max(1, math.ceil(batcher.seconds)))}
        raise HTTPException(503, "the queue is full: ask again later", later) from None
    return await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _certain(result: R | BaseException) -> R:
    """A result; for a failure the response 502, or 500 where it is none of the environment."""
    if isinstance(result, BaseException):
        status = 502 if isinstance(result, EffectError) else 500
        raise HTTPException(status, f"this failed: {reason(result)}")
    return result
