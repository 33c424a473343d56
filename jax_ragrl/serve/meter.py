"""Metrics in Prometheus's format, and an access log with one JSON object per request."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import logging.handlers
import sys
import time
from collections.abc import Callable, Collection, Mapping
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
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jax_ragrl.errors import UserError
from jax_ragrl.serve.refusals import refuse

LEFT = 499  # a client left before its reply; the number that nginx logs
SECONDS = (0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # of the histogram
MAX_LOGGED = 200  # characters per value


class Meter:
    """Counts the requests of an application.

    Args:
      paths: known paths; requests to any other count together, as `other`.
      log: writes one line per request; None writes none.
    """

    def __init__(self, paths: Collection[str], log: Callable[[str], None] | None = None) -> None:
        self._paths, self._log = frozenset(paths), log
        # An own registry: the global one would mix several servers of one process.
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        names = ("path", "status")
        self._requests = Counter("ragrl_requests", "Requests.", names, registry=registry)
        self._active = Gauge("ragrl_requests_in_progress", "Requests.", registry=registry)
        self._seconds = Histogram(
            "ragrl_request_seconds", "Duration.", ("path",), buckets=SECONDS, registry=registry
        )
        self._items = Gauge("ragrl_queue_items", "Items that wait.", ("queue",), registry=registry)
        tokens = "Tokens of questions and answers."
        self._tokens = Counter("ragrl_tokens", tokens, ("kind",), registry=registry)
        steps = "Actions, searches and calls of answered questions."
        self._steps = Counter("ragrl_steps", steps, ("role",), registry=registry)

    def add_queue(self, name: str, length: Callable[[], float]) -> None:
        """Shows the number of items in a queue."""
        self._items.labels(name).set_function(length)

    def count_answer(self, steps: Collection[Mapping[str, Any]], tokens: tuple[int, int]) -> None:
        """Counts an answer: its steps by role, and the tokens of question and answer."""
        for step in steps:
            self._steps.labels(step["role"]).inc()
        for kind, count in zip(("prompt", "completion"), tokens, strict=True):
            self._tokens.labels(kind).inc(count)

    async def metrics(self, request: Request) -> Response:
        """All metrics, in the text format."""
        return Response(
            generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Returns the application with its requests counted and logged."""

        async def measured(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            # Handlers add their facts here for the access log.
            scope.setdefault("state", {})["facts"] = {}
            # A handler that raises sends no status, and its client gets 500.
            start, status = time.monotonic(), 500

            async def note_status(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            self._active.inc()
            try:
                await _finish(app, scope, receive, note_status)
            finally:
                self._active.dec()
                self._record(scope, status, time.monotonic() - start)

        return measured

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        # Clients choose paths: each distinct one would be a new series for ever.
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
        if self._log:
            self._log(access_line(scope, status, seconds))


async def _finish(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs the application; a request that the end of the server cancels gets 503."""
    has_started = False

    async def note_start(message: Message) -> None:
        nonlocal has_started
        has_started = True
        await send(message)

    try:
        await app(scope, receive, note_start)
    except asyncio.CancelledError:
        # Uvicorn would log a traceback.
        if not has_started:
            error = HTTPException(503, "the server has ended: send the request to another one")
            await refuse(error)(scope, receive, send)


def access_line(scope: Scope, status: int, seconds: float) -> str:
    """Returns the line of a request in the access log.

    Args:
      scope: the request; `state.facts` are further fields.
      status: of the reply; `LEFT` if the client left before.
      seconds: the duration.
    """
    client = scope.get("client")
    fields = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "client": client[0] if client else None,
        "method": scope["method"][:MAX_LOGGED],
        "path": scope["path"][:MAX_LOGGED],
        "status": status,
        "seconds": round(seconds, 4),
        **scope["state"]["facts"],
    }
    # JSON escapes all other control characters, and everything outside of ASCII.
    return json.dumps(fields).replace("\x7f", "\\u007f")


def open_log(place: str) -> Callable[[str], None] | None:
    """Returns the writer of an access log.

    A line that cannot be written, such as on a full disk, is lost; the first of several in a row
    gives a warning.

    Args:
      place: a file, `-` for the standard output, or empty for no log.

    Raises:
      UserError: the file cannot be written.
    """
    if not place:
        return None
    try:
        handler = (
            logging.StreamHandler(sys.stdout)
            if place == "-"
            else logging.handlers.WatchedFileHandler(place)  # may be rotated
        )
    except OSError as error:
        raise UserError(f"cannot write the access log {place} ({error}): name a file") from error
    logger = logging.Logger("access")
    logger.addHandler(handler)
    failures: list[BaseException | None] = []
    handler.handleError = lambda record: failures.append(sys.exc_info()[1])  # type: ignore[method-assign]
    is_losing = False

    def write(line: str) -> None:
        nonlocal is_losing
        failures.clear()
        try:
            logger.info("%s", line)
        except OSError as error:  # a file that was renamed cannot be opened again
            failures.append(error)
        if failures and not is_losing:
            why = (
                f"cannot write the access log {place} ({failures[0]}): lines are lost until it can"
            )
            with contextlib.suppress(OSError):
                print(f"ragrl: {why}: make space, or restart with another file", file=sys.stderr)
        is_losing = bool(failures)

    return write
