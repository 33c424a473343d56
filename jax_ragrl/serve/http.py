"""Parts of every server: listening, shutdown, error replies, results of a queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.replies import error_message


class Limits(NamedTuple):
    """`batch`: max questions per rollout and per request; `waiting`: max queued questions."""

    batch: int = 64
    waiting: int = 256


T = TypeVar("T")
R = TypeVar("R")


def check_limits(limits: Limits) -> None:
    """Raises `UserError` if no request would fit."""
    if not 1 <= limits.batch <= limits.waiting:
        raise UserError(
            f"{limits}: give a batch of at least 1 question, and a queue of at least a batch"
        )


def listen(application: Callable[[], Starlette], name: str, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT, then answers the queued requests and exits with code 0.

    Args:
      application: makes the application, once the address is reserved.
      name: for the line that is printed when requests are accepted.
      host: bind address.
      port: TCP port; 0 = any free port.

    Raises:
      UserError: the address is not available.
    """
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}): give another --port") from error
    for number in (signal.SIGTERM, signal.SIGINT):
        # Uvicorn handles the signals while it runs, and raises them again when it has finished.
        signal.signal(number, lambda *_: sys.exit(0))
    print(f"ragrl: {name} answers at http://{host}:{listener.getsockname()[1]}", flush=True)
    # No log configuration: applying one would close the streams of absl's handlers.
    options: dict[str, Any] = {"log_config": None, "log_level": "warning", "lifespan": "on"}
    uvicorn.Server(uvicorn.Config(application(), **options)).run(sockets=[listener])


def make_application(routes: Sequence[Route], close: Callable[[], None]) -> Starlette:
    """Returns an ASGI application whose lifespan ends when `close` has returned."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        # In a thread, because closing waits for the queue and must not block the event loop.
        await asyncio.to_thread(close)

    handlers: Mapping[Any, Any] = {HTTPException: _error_response}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _error_response(request: Request, error: HTTPException) -> JSONResponse:
    body = {"error": {"message": error.detail, "code": error.status_code}}
    return JSONResponse(body, error.status_code, error.headers)


async def results(batcher: Batcher[T, R], items: Sequence[T]) -> list[R | BaseException]:
    """Returns the result of each item; an exception in place of a failed one."""
    try:
        futures = batcher.submit(items)
    except queue.Full:
        raise unavailable(batcher, "the queue is full") from None
    return await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)


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
