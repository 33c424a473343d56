"""Connections of a server: deadlines that Uvicorn lacks, and room for new ones.

Uvicorn bounds the time between two requests of a connection. It waits for ever for the end of
headers and for a client to read its reply; and its `limit_concurrency` counts connections without a
request, which would lock out all others.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

WAITING = 2048  # connections that wait in the kernel until they are accepted


class Deadlines(NamedTuple):
    """Seconds that a server gives to its clients.

    Fields:
      head: from the start of a connection, or from the first byte of a later request, to the end
        of the headers.
      body: from the end of the headers to the end of the body.
      reply: from the start of a reply to its last byte leaving for the client.
      drain: from SIGTERM to the end of the requests in progress.
    """

    head: float = 10.0
    body: float = 30.0
    reply: float = 60.0
    drain: float = 20.0


@dataclasses.dataclass
class Pool:
    """All connections of a server.

    Fields:
      deadlines: of headers and replies.
      limit: max connections. Beyond it, one without a complete request is cut: the oldest of the
        address that has the most connections.
      is_closed: whether the server is ending; connections that waited in the kernel are then cut.
    """

    deadlines: Deadlines
    limit: int
    is_closed: bool = False


class _UnambiguousRequests(h11.Connection):
    """Refuses a request with two lengths of its body (400), after which Uvicorn closes.

    A proxy may believe the other one, and then takes what follows the body for another request (RFC
    9112, section 6.3).
    """

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding")
        return event


class Connection(H11Protocol):
    """One connection; it is cut at its deadlines, or to make room for another.

    Args:
      pool: the connections of the server.
      options: arguments of Uvicorn.
    """

    def __init__(self, pool: Pool, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _UnambiguousRequests(h11.SERVER)
        self._pool, self._deadlines = pool, pool.deadlines
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._since, self._is_cut = 0.0, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not self._make_room():
            self.limit_concurrency = 0  # Uvicorn answers with 503
        super().connection_made(transport)
        self._since = self.loop.time()
        self._start("head", self._deadlines.head)
        if self._pool.is_closed:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in [*self._timers]:
            self._stop(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request():
            self._stop("head")
        elif "head" not in self._timers:
            # Also the rest of a body whose request has its reply already, such as a refusal.
            self._start("head", self._deadlines.head)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()
        if self.transport.is_closing():  # once its buffer is empty
            self._start("reply", self._deadlines.reply)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start("reply", self._deadlines.reply)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("reply", self._deadlines.reply)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop("reply")

    def cut(self) -> None:
        """Ends the connection at once."""
        self._is_cut = True
        self.transport.abort()

    def _has_request(self) -> bool:
        """Whether a request has complete headers and no complete reply."""
        return self.cycle is not None and not self.cycle.response_complete

    def _is_idle(self) -> bool:
        """Whether nothing would be lost but a request that is not complete."""
        return not self._has_request() or self.cycle.more_body

    def _make_room(self) -> bool:
        """Whether there is room for one more connection, after another was cut if need be."""
        # Connections that were cut leave the set in the next round of the event loop.
        others = [c for c in self.connections if isinstance(c, Connection) and not c._is_cut]
        if len(others) < self._pool.limit:
            return True
        idle = [connection for connection in others if connection._is_idle()]
        # One address that opens many connections cuts its own, not connections of others.
        counts = collections.Counter(connection._address() for connection in others)
        if idle:
            min(idle, key=lambda c: (-counts[c._address()], c._since)).cut()
        return bool(idle)

    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _start(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.cut)

    def _stop(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


class _Server(uvicorn.Server):
    """Closes the pool and calls `drain` before it waits for the requests in progress."""

    def __init__(self, config: uvicorn.Config, pool: Pool, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._pool, self._drain = pool, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pool.is_closed = True
        self._drain()
        await super().shutdown(sockets)


def make_server(
    application: Any,
    drain: Callable[[], None],
    deadlines: Deadlines,
    limit: int,
    **options: Any,
) -> uvicorn.Server:
    """Returns a server of an ASGI application.

    Args:
      application: the application.
      drain: called when the server is asked to end, before it waits for the requests in progress.
      deadlines: of headers, replies and of the end.
      limit: max connections.
      options: further options of `uvicorn.Config`.
    """
    pool = Pool(deadlines, limit)
    config = uvicorn.Config(
        application,
        http=functools.partial(Connection, pool),  # type: ignore[arg-type]
        ws="none",
        # No log configuration: applying one would close the streams of absl's handlers.
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        # asyncio accepts this many connections before it reads from them: fewer than `limit`, so
        # that none is cut before it is read. (uvloop accepts all that wait.)
        loop="asyncio",
        backlog=max(1, min(128, limit // 4)),
        timeout_graceful_shutdown=deadlines.drain,  # type: ignore[arg-type]
        **options,
    )
    return _Server(config, pool, drain)
