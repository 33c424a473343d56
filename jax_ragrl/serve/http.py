"""Parts of every server: settings, listening, the end, results of a queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.runtime.progress import fall_silent
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.connections import Deadlines, make_server
from jax_ragrl.serve.guard import Access, Guard, check_access
from jax_ragrl.serve.intake import MAX_BYTES, Intake
from jax_ragrl.serve.meter import LEFT, Meter, open_log
from jax_ragrl.serve.refusals import refuse
from jax_ragrl.serve.replies import error_message

GRACE = 5.0  # seconds that a batch without waiting clients has to end


class Limits(NamedTuple):
    """`batch`: max questions per rollout and per request; `waiting`: max queued questions."""

    batch: int = 64
    waiting: int = 256


class Settings(NamedTuple):
    """Properties of a server that do not depend on its endpoints.

    Fields:
      access: who may ask.
      deadlines: of connections.
      connections: max number of connections.
      body_bytes: max bytes of all bodies together.
      access_log: file of the access log, `-` for the standard output, empty for none.
      log_texts: whether the access log holds questions and queries.
    """

    access: Access = Access()
    deadlines: Deadlines = Deadlines()
    connections: int = 512
    body_bytes: int = 1 << 26
    access_log: str = ""
    log_texts: bool = False


T = TypeVar("T")
R = TypeVar("R")
SETTINGS = Settings()


def check_limits(limits: Limits) -> None:
    """Raises `UserError` if no request would fit."""
    if not 1 <= limits.batch <= limits.waiting:
        raise UserError(
            f"{limits}: give a batch of at least 1 question, and a queue of at least a batch"
        )


def check_seconds(seconds: float | None) -> None:
    """Raises `UserError` if a deadline of requests allows none; None means without a deadline."""
    if seconds is not None and not seconds > 0:
        raise UserError(f"a deadline of {seconds:g} seconds allows no request: give more than 0")


def check_settings(settings: Settings, host: str) -> None:
    """Raises `UserError` if no request would fit, or other machines could ask without a key."""
    check_access(settings.access, host)
    for name, seconds in settings.deadlines._asdict().items():
        if not seconds > 0:
            raise UserError(f"a {name} deadline of {seconds:g} seconds: give more than 0")
    if settings.connections < 4 or settings.body_bytes < MAX_BYTES:
        raise UserError(
            f"{settings.connections} connections and {settings.body_bytes} bytes of bodies: allow "
            f"at least 4 connections, and {MAX_BYTES} bytes, the limit of one request"
        )


def listen(
    application: Callable[[], Starlette],
    name: str,
    host: str,
    port: int,
    settings: Settings = SETTINGS,
) -> None:
    """Serves until SIGTERM or SIGINT, then answers the queued requests and exits with code 0.

    Args:
      application: makes the application, once the address is reserved.
      name: for the line that is printed when requests are accepted.
      host: bind address.
      port: TCP port; 0 = any free port.
      settings: bounds on connections, and who may ask.

    Raises:
      UserError: the address is not available, or reachable by others without an API key.
    """
    check_settings(settings, host)
    listener = _bind(host, port)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Uvicorn handles the signals while it runs, and raises them again when it has finished.
        signal.signal(number, lambda *_: sys.exit(0))
    place = f"[{host}]" if ":" in host else host
    print(f"ragrl: {name} answers at http://{place}:{listener.getsockname()[1]}", flush=True)
    fall_silent()
    app = application()
    app.state.drained = True
    # Others' `X-Forwarded-For` would let a client choose the address that its limit belongs to.
    server = make_server(
        app, app.state.intake.drain, settings.deadlines, settings.connections, proxy_headers=False
    )
    try:
        server.run(sockets=[listener])
    finally:
        if not app.state.drained:
            _exit_now()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}): give another --port") from error


def _exit_now() -> None:
    """Ends the process although a thread is still at work."""
    print("ragrl: a batch was still running at the deadline: it is lost", file=sys.stderr)
    sys.stdout.flush()
    os._exit(1)


def make_application(
    routes: Sequence[Route],
    close: Callable[[], bool],
    queues: Mapping[str, Batcher[Any, Any]],
    guard: Guard | None = None,
    settings: Settings = SETTINGS,
) -> Starlette:
    """Returns an ASGI application whose lifespan ends when `close` has returned.

    Args:
      routes: the endpoints; `/metrics` is added.
      close: ends the work, and returns whether it has ended.
      queues: are shown in the metrics.
      guard: refuses requests before anything else; None admits every client.
      settings: bounds on bodies, and the access log.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        # In a thread, because closing waits for the queue and must not block the event loop.
        app.state.drained = await asyncio.to_thread(close)

    intake = Intake(settings.deadlines.body, settings.body_bytes)
    paths = ["/metrics", *(route.path for route in routes)]
    meter = Meter(paths, open_log(settings.access_log))
    for name, batcher in queues.items():
        meter.add_queue(name, batcher.__len__)
    layers = [meter.middleware, *([guard.middleware] if guard else []), intake.middleware]
    app = Starlette(
        routes=[*routes, Route("/metrics", meter.metrics)],
        lifespan=lifespan,
        middleware=[Middleware(layer) for layer in layers],
        exception_handlers={HTTPException: _refusal, ClientDisconnect: _nobody},  # type: ignore[dict-item]
    )
    app.state.intake, app.state.meter, app.state.log_texts = intake, meter, settings.log_texts
    return app


async def _refusal(request: Request, error: HTTPException) -> JSONResponse:
    return refuse(error)


async def _nobody(request: Request, error: ClientDisconnect) -> Response:
    """The reply to a client that has left: nobody reads it, but it is counted and logged."""
    return Response(status_code=LEFT)


def note(request: Request, kind: str, texts: Sequence[str]) -> None:
    """Adds the number of texts to the access log, and the texts themselves if it holds them."""
    facts = {kind: len(texts)} | ({"texts": [*texts]} if request.app.state.log_texts else {})
    request.state.facts.update(facts)


@contextlib.asynccontextmanager
async def deadline(seconds: float | None, batcher: Batcher[Any, Any]) -> AsyncIterator[None]:
    """Cancels the body after `seconds`; the request gets status 503.

    Args:
      seconds: None waits for ever.
      batcher: the queue that the request waits for.
    """
    try:
        # Leaving the block cancels the items that wait, so that nobody works on them.
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise unavailable(batcher, f"this took longer than {seconds:g} seconds") from None


async def results(
    batcher: Batcher[T, R], items: Sequence[T], request: Request
) -> list[R | BaseException]:
    """Returns the result of each item; an exception in place of a failed one.

    Args:
      batcher: the queue.
      items: are queued together, or not at all.
      request: of a client; if it leaves, its waiting items are dropped.
    """
    try:
        futures = batcher.submit(items)
    except queue.Full:
        raise unavailable(batcher, "the queue is full") from None
    work = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    return await _unless_left(request, work)


async def _unless_left(request: Request, work: Awaitable[R]) -> R:
    """The result of `work`, which is cancelled if the client leaves first."""
    task, seconds_left = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    # Reads the exception of canceled work, which asyncio would log as never retrieved.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({task, seconds_left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        seconds_left.cancel()


async def _left(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def announce(name: str, warmup: Future[Any], *, again: bool = False) -> Future[Any]:
    """Prints when a server is ready, or why it is not; returns the future.

    Args:
      name: of the server.
      warmup: the result of its own first question, or search.
      again: whether another one has failed before; the reason of this one is not printed.
    """
    start = time.monotonic()

    def tell(done: Future[Any]) -> None:
        seconds = time.monotonic() - start
        if done.cancelled() or (done.exception() and again):
            return
        if error := done.exception():
            why = f"{error_message(error)}; each GET /health tries again"
            print(f"ragrl: {name} is not ready: its warm-up failed: {why}", flush=True)
        else:
            print(f"ragrl: {name} is ready after {seconds:.1f} s", flush=True)

    warmup.add_done_callback(tell)
    return warmup


def unavailable(batcher: Batcher[Any, Any], reason: str) -> HTTPException:
    """Returns status 503, after which a client may try again."""
    # The queue has room again after a batch, which takes about as long as the last one.
    headers = {"Retry-After": str(max(1, math.ceil(batcher.seconds)))}
    return HTTPException(503, f"{reason}: try again later", headers)


def result_or_raise(result: R | BaseException) -> R:
    """Returns a result. Raises status 502 for a failure of the environment, 500 for any other."""
    if isinstance(result, BaseException):
        status = 502 if isinstance(result, EffectError) else 500
        raise HTTPException(status, f"this failed: {error_message(result)}")
    return result
