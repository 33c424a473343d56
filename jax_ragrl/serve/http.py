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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.runtime.progress import fall_silent
from jax_ragrl.serve.access import SETTINGS, KeyCheck, Settings, check_access, is_loopback
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.bodies import refuse
from jax_ragrl.serve.meter import LEFT, Meter
from jax_ragrl.serve.replies import error_message

GRACE = 5.0  # seconds that a batch without waiting clients has to end

T = TypeVar("T")
R = TypeVar("R")


class Limits(NamedTuple):
    """Bounds on requests.

    Fields:
      batch: max items per batch; also max questions per request.
      waiting: max queued items.
      seconds: deadline of a request; None waits for ever.
    """

    batch: int
    waiting: int
    seconds: float | None = None


def check_limits(limits: Limits) -> None:
    """Raises `UserError` if no request would fit."""
    if not 1 <= limits.batch <= limits.waiting:
        raise UserError(f"{limits}: give a batch of at least 1, and a queue of at least a batch")
    if limits.seconds is not None and not limits.seconds > 0:
        raise UserError(f"a deadline of {limits.seconds:g} seconds: give more than 0")


def listen(application: Callable[[], Starlette], name: str, settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then answers the queued requests and exits with code 0.

    The application is made once the address is reserved; `name` is for the line that says so.

    Raises:
      UserError: the address is not available, or reachable by others without an API key.
    """
    check_access(settings)
    host, port = settings.host, settings.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}): give another --port") from error
    for number in (signal.SIGTERM, signal.SIGINT):
        # Uvicorn handles the signals while it runs, and raises them again when it has finished.
        signal.signal(number, lambda *_: sys.exit(0))
    place = f"[{host}]" if ":" in host else host
    print(f"ragrl: {name} answers at http://{place}:{listener.getsockname()[1]}", flush=True)
    if not is_loopback(host):
        print(
            f"ragrl: warning: other machines reach {host} without TLS, and a slow or greedy client "
            "can keep others out: put a proxy in front, such as nginx with launch/nginx.conf",
            file=sys.stderr,
        )
    fall_silent()
    app = application()
    app.state.drained = True
    try:
        make_server(app, settings).run(sockets=[listener])
    finally:
        if not app.state.drained:
            print("ragrl: a batch was still running at the deadline: it is lost", file=sys.stderr)
            sys.stdout.flush()
            os._exit(1)  # although a thread is still at work


def make_server(app: Starlette, settings: Settings) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        # No log configuration: applying one would close the streams of absl's handlers.
        log_config=None,
        log_level="warning",
        lifespan="on",
        limit_concurrency=settings.connections,
        timeout_graceful_shutdown=settings.drain,
    )
    return uvicorn.Server(config)


def make_application(
    routes: Sequence[Route],
    queues: Mapping[str, Batcher[Any, Any]],
    settings: Settings = SETTINGS,
    running: contextlib.AbstractAsyncContextManager[Any] | None = None,
) -> Starlette:
    """Returns an ASGI application whose lifespan ends with the work of its queues.

    Args:
      routes: the endpoints; `/metrics` is added.
      queues: are shown in the metrics, and closed at the end.
      settings: who may ask.
      running: a context that some of the routes need.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with running or contextlib.nullcontext():
            yield
        # In threads, because closing waits for the queue and must not block the event loop.
        ends = (asyncio.to_thread(batcher.close, GRACE) for batcher in queues.values())
        app.state.drained = all(await asyncio.gather(*ends))

    async def refusal(request: Request, error: HTTPException) -> JSONResponse:
        return refuse(error.status_code, error.detail, error.headers)

    async def nobody(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=LEFT)  # is counted, although nobody reads it

    # A page of another site can point its own name at a loopback address, and would then be part of
    # this site. On other addresses a key keeps such pages out.
    host, names = settings.host, ["*"]
    if settings.hosts or is_loopback(host):
        bound = f"[{host}]" if ":" in host else host
        names = ["localhost", "127.0.0.1", "[::1]", bound, *settings.hosts]
    meter = Meter(["/metrics", *(route.path for route in routes)], queues)
    app = Starlette(
        routes=[*routes, Route("/metrics", meter.metrics)],
        lifespan=lifespan,
        middleware=[
            Middleware(meter.middleware),
            Middleware(TrustedHostMiddleware, names, www_redirect=False),
            Middleware(KeyCheck, settings.keys),
        ],
        exception_handlers={HTTPException: refusal, ClientDisconnect: nobody},  # type: ignore[dict-item]
    )
    app.state.meter = meter
    return app


@contextlib.asynccontextmanager
async def deadline(seconds: float | None, batcher: Batcher[Any, Any]) -> AsyncIterator[None]:
    """Answers a request that waits for `batcher` with status 503 after `seconds`, or at the end."""
    try:
        # Leaving the block cancels the items that wait, so that nobody works on them.
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise unavailable(batcher, f"this took longer than {seconds:g} seconds") from None
    except asyncio.CancelledError:
        raise unavailable(batcher, "the server is ending") from None


async def results(
    batcher: Batcher[T, R], items: Sequence[T], request: Request | None = None
) -> list[R | BaseException]:
    """Returns the result of each item; an exception in place of a failed one.

    Args:
      batcher: the queue.
      items: are queued together, or not at all.
      request: of a client; if it leaves, its waiting items are dropped. None: of no HTTP client.
    """
    try:
        futures = batcher.submit(items)
    except queue.Full:
        raise unavailable(batcher, "the queue is full") from None
    work = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    # Reads the exception of canceled work, which asyncio would log as never retrieved.
    work.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def leave() -> None:
        if request is None:
            await asyncio.wait([work])
            return
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving: asyncio.Future[Any] = asyncio.ensure_future(leave())
    try:
        await asyncio.wait([work, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        leaving.cancel()


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


class Warmup(Generic[T]):
    """A request of the server `name` to itself, which compiles programs, until it succeeds."""

    def __init__(self, name: str, batcher: Batcher[T, Any], item: T) -> None:
        self._name, self._batcher, self._item = name, batcher, item
        self._why = ""  # it failed; is printed once
        self._ask()

    def _ask(self) -> None:
        (self._future,), start = self._batcher.submit([self._item]), time.monotonic()

        def tell(done: Future[Any]) -> None:
            if not done.cancelled() and (error := done.exception()) is None:
                seconds = time.monotonic() - start
                print(f"ragrl: {self._name} is ready after {seconds:.1f} s", flush=True)
            elif not done.cancelled() and not self._why:
                self._why = f"{error_message(error)}; each GET /health tries again"
                line = f"ragrl: {self._name} is not ready: its warm-up failed: {self._why}"
                print(line, flush=True)

        self._future.add_done_callback(tell)

    def health(self, request: Request, facts: Mapping[str, Any]) -> JSONResponse:
        """The reply of `/health`: status 503 until the warm-up has succeeded.

        `facts` are further fields. Without an API key it only says whether the server is ready.
        """
        error = self._future.exception() if self._future.done() else None
        body: dict[str, Any] = {"ready": self._future.done() and error is None}
        if request.state.is_authorized:
            body |= {**facts, "waiting": len(self._batcher)}
            body |= {} if error is None else {"failure": error_message(error)}
        if error is not None:
            # A server that it needs may be available again.
            with contextlib.suppress(queue.Full):
                self._ask()
        return JSONResponse(body, 200 if body["ready"] else 503)
