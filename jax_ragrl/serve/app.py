"""HTTP server of a trained system: questions that arrive during a rollout join the next one.

  POST /answer                {"question": ...} or {"questions": [...]}; "trace": true adds steps
  POST /v1/chat/completions   OpenAI API: the last user message is the question
  POST /retrieve              search in the index, in the format of `retrieval/remote.py`
  GET  /v1/models, /health    the served model; healthy once its programs are compiled

Answers are the same as under `evaluate` and `ask`: greedy, one path per question, independent of
the other questions in the batch. (Seeds for a sampled language model are folded from the text.) The
server has no authentication.
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
from jax_ragrl.serve.replies import Answer, ServedSystem, answer_questions, error_message, to_json
from jax_ragrl.types import Hits


class Limits(NamedTuple):
    """`batch`: max questions per rollout and per request; `waiting`: max queued questions."""

    batch: int = 64
    waiting: int = 256


DEFAULT = Limits()
SEARCH_LIMITS = Limits(batch=256, waiting=2 * bodies.MAX_QUERIES)  # queries
T = TypeVar("T")
R = TypeVar("R")


def serve(served_system: ServedSystem, host: str, port: int, limits: Limits = DEFAULT) -> None:
    """Serves until SIGTERM or SIGINT, then answers the queued questions and exits with code 0.

    Args:
      served_system: the system and its environment.
      host: bind address.
      port: TCP port; 0 = any free port.
      limits: sizes of batch and queue.

    Raises:
      UserError: the limits are invalid, or the address is not available.
    """
    if not 1 <= limits.batch <= limits.waiting:
        raise UserError(
            f"{limits}: give a batch of at least 1 question, and a queue of at least a batch"
        )
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}): give another --port") from error
    for number in (signal.SIGTERM, signal.SIGINT):
        # Uvicorn handles the signals while it runs, and raises them again when it has finished.
        signal.signal(number, lambda *_: sys.exit(0))
    print(
        f"ragrl: {served_system.name} answers at http://{host}:{listener.getsockname()[1]}",
        flush=True,
    )
    # No log configuration: applying one would close the streams of absl's handlers.
    options: dict[str, Any] = {"log_config": None, "log_level": "warning", "lifespan": "on"}
    config = uvicorn.Config(application(served_system, limits), **options)
    uvicorn.Server(config).run(sockets=[listener])


def application(served_system: ServedSystem, limits: Limits = DEFAULT) -> Starlette:
    """The ASGI application; its lifespan ends when all accepted questions are answered."""
    service = Service(served_system, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        # In a thread, because closing waits for rollouts and must not block the event loop.
        await asyncio.to_thread(service.close)

    routes = [
        Route("/answer", service.answer, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/retrieve", service.retrieve, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
    ]
    handlers: Mapping[Any, Any] = {HTTPException: _error_response}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _error_response(request: Request, error: HTTPException) -> JSONResponse:
    body = {"error": {"message": error.detail, "code": error.status_code}}
    return JSONResponse(body, error.status_code, error.headers)


class Service:
    """The endpoints. One thread rolls out questions, another searches."""

    def __init__(self, served_system: ServedSystem, limits: Limits) -> None:
        self.served_system, self.limits = served_system, limits
        self.answers: Batcher[str, Answer] = Batcher(
            lambda texts: answer_questions(served_system, texts), limits.batch, limits.waiting
        )
        # Own thread: a search request must not wait for a rollout.
        self.searches: Batcher[tuple[str, int], Hits] = Batcher(
            self._search, SEARCH_LIMITS.batch, SEARCH_LIMITS.waiting
        )
        (self.warmup,) = self.answers.submit([served_system.warmup_question])

    def close(self) -> None:
        """Returns when all accepted requests are processed."""
        self.answers.close()
        self.searches.close()

    def _search(self, requests: Sequence[tuple[str, int]]) -> list[Hits | Exception]:
        pages = [(query, k, 0) for query, k in requests]
        return [*search_pages(self.served_system.environment.retriever, pages)]

    async def answer(self, request: Request) -> JSONResponse:
        """The answer to a question, or the answers to several, which fail independently."""
        body = await bodies.read_json(request)
        texts, trace = bodies.parse_answer_request(body, self.limits.batch)
        results = await _results(self.answers, texts)
        if "question" in body:
            return JSONResponse(to_json(texts[0], _result_or_raise(results[0]), trace))
        answers = [to_json(text, x, trace) for text, x in zip(texts, results, strict=True)]
        return JSONResponse({"answers": answers})

    async def chat(self, request: Request) -> JSONResponse:
        """A chat completion; `why` next to its message is the reason for its end."""
        text = bodies.parse_chat_request(await bodies.read_json(request))
        answer = _result_or_raise((await _results(self.answers, [text]))[0])
        message = {"role": "assistant", "content": answer.answer or ""}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop",  # as the API requires; `why` is this system's reason
            "why": answer.finish_reason,
        }
        # The question and the answer only: the rollout between them is not part of the API.
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = dict(zip(names, (*answer.tokens, sum(answer.tokens)), strict=True))
        now = time.time_ns()
        head = {"id": f"chatcmpl-{now:x}", "object": "chat.completion", "created": now // 10**9}
        return JSONResponse(
            head | {"model": self.served_system.name, "choices": [choice], "usage": usage}
        )

    async def retrieve(self, request: Request) -> JSONResponse:
        """The documents of each query, best first, with scores if requested."""
        body = await bodies.read_json(request)
        default_k = max(self.served_system.system.top_k, 1)
        requests, with_scores = bodies.parse_search_request(body, default_k)
        hits = [_result_or_raise(x) for x in await _results(self.searches, requests)]
        result: list[list[Any]] = [[to_document(p) for p in x.passages] for x in hits]
        if with_scores:
            result = [
                [{"document": d, "score": s} for d, s in zip(documents, x.scores, strict=True)]
                for documents, x in zip(result, hits, strict=True)
            ]
        return JSONResponse({"result": result})

    async def models(self, request: Request) -> JSONResponse:
        """The list of the one served model."""
        model = {
            "id": self.served_system.name,
            "object": "model",
            "created": 0,
            "owned_by": "jax_ragrl",
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> JSONResponse:
        """The served system; status 503 until the warm-up question is answered."""
        retriever = self.served_system.environment.retriever
        corpus = getattr(retriever, "corpus", None)
        body = {
            "ready": _succeeded(self.warmup),
            "system": self.served_system.name,
            "policy": self.served_system.policy,
            "corpus": retriever.fingerprint,
            "passages": None if corpus is None else len(corpus),
            "waiting": len(self.answers),
        }
        if self.warmup.done() and self.warmup.exception():
            # Retry: the language model or the retriever may be available again.
            body["failure"] = error_message(self.warmup.exception())
            with contextlib.suppress(queue.Full):
                (self.warmup,) = self.answers.submit([self.served_system.warmup_question])
        return JSONResponse(body, 200 if body["ready"] else 503)


async def _results(batcher: Batcher[T, R], items: Sequence[T]) -> list[R | BaseException]:
    """The result of each item; an exception in place of a failed one."""
    try:
        futures = batcher.submit(items)
    except queue.Full:
        # The queue has room again after a batch, which takes about as long as the last one.
        headers = {"Retry-After": str(max(1, math.ceil(batcher.seconds)))}
        raise HTTPException(503, "the queue is full: try again later", headers) from None
    return await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _result_or_raise(result: R | BaseException) -> R:
    """A result. Raises status 502 for a failure of the environment, 500 for any other."""
    if isinstance(result, BaseException):
        status = 502 if isinstance(result, EffectError) else 500
        raise HTTPException(status, f"this failed: {error_message(result)}")
    return result
