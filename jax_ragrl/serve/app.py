"""HTTP server of a trained system: questions that arrive during a rollout join the next one.

  GET  /                      a page that asks questions
  POST /answer                {"question": ...} or {"questions": [...]}; "trace": true adds steps,
                              "passages": true adds passages
  POST /v1/chat/completions   OpenAI API: the last user message is the question; may be streamed
  POST /retrieve              search in the index, in the format of `retrieval/remote.py`
  GET  /v1/models, /health    the served model; healthy once its programs are compiled
  GET  /metrics               counts and durations, for Prometheus

Answers are the same as under `evaluate` and `ask`: greedy, one path per question, independent of
the other questions in the batch. (Seeds for a sampled language model are folded from the text.)
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jax_ragrl.serve import bodies, chat
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
    result_or_raise,
    results,
)
from jax_ragrl.serve.page import page
from jax_ragrl.serve.replies import Answer, ServedSystem, answer_questions, error_message, to_json
from jax_ragrl.serve.search import SearchService, health_reply

DEFAULT = Limits()
SECONDS = 600.0  # OpenAI's client waits as long


def serve(
    served_system: ServedSystem,
    host: str,
    port: int,
    limits: Limits = DEFAULT,
    settings: Settings = SETTINGS,
    seconds: float | None = SECONDS,
) -> None:
    """Serves until SIGTERM or SIGINT, then answers the queued questions and exits with code 0.

    Args:
      served_system: the system and its environment.
      host: bind address.
      port: TCP port; 0 = any free port.
      limits: sizes of batch and queue.
      settings: bounds on connections, and who may ask.
      seconds: deadline of an answer.

    Raises:
      UserError: the limits are invalid, or the address is not available.
    """
    check_limits(limits)
    check_seconds(seconds)
    guard = Guard(settings.access, host)
    make = functools.partial(application, served_system, limits, guard, settings, seconds)
    listen(make, served_system.name, host, port, settings)


def application(
    served_system: ServedSystem,
    limits: Limits = DEFAULT,
    guard: Guard | None = None,
    settings: Settings = SETTINGS,
    seconds: float | None = SECONDS,
) -> Starlette:
    """Returns the ASGI application; its lifespan ends when all accepted questions are answered.

    Args:
      served_system: the system and its environment.
      limits: sizes of batch and queue.
      guard: who may ask; None admits every client.
      settings: bounds on bodies, and the access log.
      seconds: deadline of an answer.
    """
    service = Service(served_system, limits, seconds)
    routes = [
        Route("/", page),
        Route("/answer", service.answer, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/retrieve", service.search.retrieve, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
    ]
    queues: dict[str, Batcher[Any, Any]] = {"answers": service.answers}
    queues["searches"] = service.search.searches
    return make_application(routes, service.close, queues, guard, settings)


class Service:
    """The endpoints. One thread rolls out questions, another searches."""

    def __init__(self, served_system: ServedSystem, limits: Limits, seconds: float | None) -> None:
        self.served_system, self.limits, self.seconds = served_system, limits, seconds
        self.answers: Batcher[str, Answer] = Batcher(
            lambda texts: answer_questions(served_system, texts), limits.batch, limits.waiting
        )
        # Own thread: a search request must not wait for a rollout.
        retriever, top_k = served_system.environment.retriever, served_system.system.top_k
        self.search = SearchService(retriever, max(top_k, 1), seconds)
        (warmup,) = self.answers.submit([served_system.warmup_question])
        self.warmup = announce(served_system.name, warmup)

    def close(self) -> bool:
        """Returns when all accepted requests are processed; false if the last batch hangs."""
        return self.answers.close(GRACE) and self.search.close()

    async def answer(self, request: Request) -> Response:
        """The answer to a question, or the answers to several, which fail independently."""
        body = await bodies.read_json(request)
        texts, *options = bodies.parse_answer_request(body, self.limits.batch)
        answers = await self._answers(request, texts)
        if "question" in body:
            return JSONResponse(to_json(texts[0], result_or_raise(answers[0]), *options))
        pairs = zip(texts, answers, strict=True)
        return JSONResponse(
            {"answers": [to_json(text, answer, *options) for text, answer in pairs]}
        )

    async def _answers(
        self, request: Request, texts: Sequence[str]
    ) -> list[Answer | BaseException]:
        """The answers to the questions of a request, which the metrics and the log count."""
        note(request, "questions", texts)
        async with deadline(self.seconds, self.answers):
            answers = await results(self.answers, texts, request)
        for answer in answers:
            if isinstance(answer, Answer):
                request.app.state.meter.count_answer(answer.steps, answer.tokens)
        return answers

    async def chat(self, request: Request) -> Response:
        """A chat completion, as one object or as events."""
        text, stream, with_usage = chat.parse_chat_request(await bodies.read_json(request))
        # Errors keep their status in a stream too, because it starts with the answer.
        answer, model = (
            result_or_raise((await self._answers(request, [text]))[0]),
            self.served_system.name,
        )
        if stream:
            events = chat.events(model, answer, with_usage)
            return StreamingResponse(events, media_type=chat.EVENTS)
        return JSONResponse(chat.completion(model, answer))

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
        body = {
            "ready": _succeeded(self.warmup),
            "system": self.served_system.name,
            "policy": self.served_system.policy,
            **self.search.describe(),
            "waiting": len(self.answers),
        }
        if self.warmup.done() and self.warmup.exception():
            # Retry: the language model or the retriever may be available again.
            body["failure"] = error_message(self.warmup.exception())
            with contextlib.suppress(queue.Full):
                (warmup,) = self.answers.submit([self.served_system.warmup_question])
                self.warmup = announce(self.served_system.name, warmup, again=True)
        return health_reply(request, body)


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None
