"""HTTP server of a trained system: questions that arrive during a rollout join the next one.

  GET  /                      a page that asks questions
  POST /answer                {"question": ...} or {"questions": [...]}; "trace": true adds steps,
                              "passages": true adds passages
  POST /v1/chat/completions   OpenAI API: the last user message is the question; may be streamed
  POST /retrieve              search in the index, in the format of `retrieval/remote.py`
  POST /mcp                   tools for agents, see `serve/mcp.py`, if asked for
  GET  /v1/models, /health    the served model; healthy once its programs are compiled
  GET  /metrics               counts and durations, for Prometheus

Answers are the same as under `evaluate` and `ask`: greedy, one path per question, independent of
the other questions in the batch. (Seeds for a sampled language model are folded from the text.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jax_ragrl.serve import bodies, chat, http, mcp, search
from jax_ragrl.serve.access import SETTINGS, Settings
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.http import Limits
from jax_ragrl.serve.page import page
from jax_ragrl.serve.replies import Answer, ServedSystem, answer_questions, to_json

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

LIMITS = Limits(batch=64, waiting=256, seconds=600.0)  # OpenAI's client waits as long


def serve(
    served_system: ServedSystem, limits: Limits = LIMITS, settings: Settings = SETTINGS
) -> None:
    """Serves until SIGTERM or SIGINT, then answers the queued questions and exits with code 0.

    Raises:
      UserError: the limits are invalid, or the address is not available.
    """
    if settings.mcp == mcp.STDIO:
        service = Service(served_system, limits)
        service.answers.submit([served_system.warmup_question])
        return mcp.over_stdio(service.tools())
    make = functools.partial(application, served_system, limits, settings)
    http.listen(make, served_system.name, settings)


def application(
    served_system: ServedSystem, limits: Limits = LIMITS, settings: Settings = SETTINGS
) -> Starlette:
    """Returns the ASGI application, see `serve`; its lifespan ends with the last answer."""
    http.check_limits(limits)
    service = Service(served_system, limits)
    warmup = http.Warmup(served_system.name, service.answers, served_system.warmup_question)

    async def health(request: Request) -> JSONResponse:
        facts = {"system": served_system.name, "policy": served_system.policy}
        return warmup.health(request, facts | service.search.describe())

    tools, running = mcp.over_http(service.tools()) if settings.mcp else ((), None)
    routes = [
        Route("/", page),
        Route("/answer", service.answer, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/retrieve", service.search.retrieve, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", health),
        *tools,
    ]
    queues: dict[str, Batcher[Any, Any]] = {
        "answers": service.answers,
        "searches": service.search.searches,
    }
    return http.make_application(routes, queues, settings, running)


class Service:
    """The endpoints. One thread rolls out questions, another searches."""

    def __init__(self, served_system: ServedSystem, limits: Limits) -> None:
        self.served_system, self.limits = served_system, limits
        self.answers: Batcher[str, Answer] = Batcher(
            lambda texts: answer_questions(served_system, texts), limits.batch, limits.waiting
        )
        # Own thread: a search request must not wait for a rollout.
        retriever, top_k = served_system.environment.retriever, served_system.system.top_k
        self.search = search.SearchService(
            retriever, max(top_k, 1), search.LIMITS._replace(seconds=limits.seconds)
        )

    def tools(self) -> MCPServer:
        search, seconds = self.search, self.limits.seconds
        return mcp.tool_server(search.searches, search.top_k, seconds, self.answers)

    async def answer(self, request: Request) -> Response:
        """The answer to a question, or the answers to several, which fail independently."""
        async with http.deadline(self.limits.seconds, self.answers):
            body = await bodies.read_json(request)
            texts, *options = bodies.parse_answer_request(body, self.limits.batch)
            answers = await self._answers(request, texts)
        if "question" in body:
            return JSONResponse(to_json(texts[0], http.result_or_raise(answers[0]), *options))
        pairs = zip(texts, answers, strict=True)
        return JSONResponse(
            {"answers": [to_json(text, answer, *options) for text, answer in pairs]}
        )

    async def chat(self, request: Request) -> Response:
        """A chat completion, as one object or as events."""
        async with http.deadline(self.limits.seconds, self.answers):
            text, stream, with_usage = chat.parse_chat_request(await bodies.read_json(request))
            (result,) = await self._answers(request, [text])
        # Errors keep their status in a stream too, because it starts with the answer.
        answer, model = http.result_or_raise(result), self.served_system.name
        if stream:
            events = chat.events(model, answer, with_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(chat.completion(model, answer))

    async def _answers(
        self, request: Request, texts: Sequence[str]
    ) -> list[Answer | BaseException]:
        """The answers to the questions of a request, which the metrics count."""
        answers = await http.results(self.answers, texts, request)
        for answer in answers:
            if isinstance(answer, Answer):
                request.app.state.meter.count_answer(answer.steps, answer.tokens)
        return answers

    async def models(self, request: Request) -> JSONResponse:
        model = {"id": self.served_system.name, "object": "model", "created": 0}
        return JSONResponse({"object": "list", "data": [{**model, "owned_by": "jax_ragrl"}]})
