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

import contextlib
import queue
import time
from concurrent.futures import Future
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_ragrl.serve import bodies
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.http import (
    Limits,
    check_limits,
    listen,
    make_application,
    result_or_raise,
    results,
)
from jax_ragrl.serve.replies import Answer, ServedSystem, answer_questions, error_message, to_json
from jax_ragrl.serve.search import SearchService

DEFAULT = Limits()


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
    check_limits(limits)
    listen(lambda: application(served_system, limits), served_system.name, host, port)


def application(served_system: ServedSystem, limits: Limits = DEFAULT) -> Starlette:
    """The ASGI application; its lifespan ends when all accepted questions are answered."""
    service = Service(served_system, limits)
    routes = [
        Route("/answer", service.answer, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/retrieve", service.search.retrieve, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
    ]
    return make_application(routes, service.close)


class Service:
    """The endpoints. One thread rolls out questions, another searches."""

    def __init__(self, served_system: ServedSystem, limits: Limits) -> None:
        self.served_system, self.limits = served_system, limits
        self.answers: Batcher[str, Answer] = Batcher(
            lambda texts: answer_questions(served_system, texts), limits.batch, limits.waiting
        )
        # Own thread: a search request must not wait for a rollout.
        retriever, top_k = served_system.environment.retriever, served_system.system.top_k
        self.search = SearchService(retriever, max(top_k, 1))
        (self.warmup,) = self.answers.submit([served_system.warmup_question])

    def close(self) -> None:
        """Returns when all accepted requests are processed."""
        self.answers.close()
        self.search.close()

    async def answer(self, request: Request) -> JSONResponse:
        """The answer to a question, or the answers to several, which fail independently."""
        body = await bodies.read_json(request)
        texts, trace = bodies.parse_answer_request(body, self.limits.batch)
        answers = await results(self.answers, texts)
        if "question" in body:
            return JSONResponse(to_json(texts[0], result_or_raise(answers[0]), trace))
        pairs = zip(texts, answers, strict=True)
        return JSONResponse({"answers": [to_json(text, answer, trace) for text, answer in pairs]})

    async def chat(self, request: Request) -> JSONResponse:
        """A chat completion; `why` next to its message is the reason for its end."""
        text = bodies.parse_chat_request(await bodies.read_json(request))
        answer = result_or_raise((await results(self.answers, [text]))[0])
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
                (self.warmup,) = self.answers.submit([self.served_system.warmup_question])
        return JSONResponse(body, 200 if body["ready"] else 503)


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None
