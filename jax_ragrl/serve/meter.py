"""Metrics of a server in Prometheus's format."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sized
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEFT = 499  # a client left before its reply; the number that nginx logs
SECONDS = (0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # of the histogram


class Meter:
    """Counts the requests of an application.

    Args:
      paths: known paths; requests to any other count together, as `other`.
      queues: their lengths are shown.
    """

    def __init__(self, paths: Collection[str], queues: Mapping[str, Sized]) -> None:
        self._paths = frozenset(paths)
        # An own registry: the global one would mix several servers of one process.
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        names = ("path", "status")
        self._requests = Counter("ragrl_requests", "Requests.", names, registry=registry)
        self._active = Gauge("ragrl_requests_in_progress", "Requests.", registry=registry)
        self._seconds = Histogram(
            "ragrl_request_seconds", "Duration.", ("path",), buckets=SECONDS, registry=registry
        )
        items = Gauge("ragrl_queue_items", "Items that wait.", ("queue",), registry=registry)
        for name, queue in queues.items():
            items.labels(name).set_function(queue.__len__)
        self._tokens = Counter("ragrl_tokens", "Tokens.", ("kind",), registry=registry)
        self._steps = Counter("ragrl_steps", "Steps of answers.", ("role",), registry=registry)

    def count_answer(self, steps: Collection[Mapping[str, Any]], tokens: tuple[int, int]) -> None:
        """Counts an answer: its steps by role, and the tokens of question and answer."""
        for step in steps:
            self._steps.labels(step["role"]).inc()
        for kind, count in zip(("prompt", "completion"), tokens, strict=True):
            self._tokens.labels(kind).inc(count)

    async def metrics(self, request: Request) -> Response:
        """All metrics, in the text format."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Returns the application with its requests counted."""

        async def measured(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            # A handler that raises sends no status, and its client gets 500.
            start, status = time.monotonic(), 500

            async def note_status(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                with self._active.track_inprogress():
                    await app(scope, receive, note_status)
            finally:
                # Clients choose paths: each distinct one would be a new series for ever.
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._requests.labels(path, str(status)).inc()
                self._seconds.labels(path).observe(time.monotonic() - start)

        return measured
