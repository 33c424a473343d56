"""Bodies of requests: bounds on their size, their duration and their memory in total."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BYTES = 1 << 22  # per request


class Intake:
    """The bodies that a server holds; a body counts until its request has a reply.

    Args:
      seconds: deadline of a body, counted from the end of the headers.
      memory: max bytes of all bodies together.

    Attributes:
      held: bytes of all bodies.
    """

    def __init__(self, seconds: float, memory: int) -> None:
        self.seconds, self.memory, self.held = seconds, memory, 0
        self._waits: set[asyncio.Timeout] = set()
        self._is_draining = False

    def drain(self) -> None:
        """Refuses the bodies that are not complete, now and later."""
        self._is_draining = True
        # Requests that wait for their body would otherwise delay the end of the server.
        for wait in self._waits:
            wait.reschedule(0.0)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Returns the application with bounds on the bodies that it receives."""

        async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
            body = _Body(self, receive)
            try:
                await app(scope, body.receive if scope["type"] == "http" else receive, send)
            finally:
                # Also after an error: memory that is never returned would refuse all requests.
                self.held -= body.size

        return bounded

    @contextlib.contextmanager
    def _deadline(self, wait: asyncio.Timeout) -> Iterator[None]:
        """Ends `wait` early if the server stops meanwhile."""
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    async def _next(self, receive: Receive, end: float) -> Message:
        """The next part of a body, which has to arrive before `end`."""
        try:
            async with asyncio.timeout_at(0.0 if self._is_draining else end) as wait:
                with self._deadline(wait):
                    return await receive()
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> HTTPException:
        if self._is_draining:
            return HTTPException(503, "the server is stopping: send the request to another one")
        return HTTPException(
            408, f"the request took longer than {self.seconds:g} seconds to arrive: send it faster"
        )


class _Body:
    """The body of one request; `size` is the number of its bytes so far."""

    def __init__(self, intake: Intake, receive: Receive) -> None:
        self._intake, self._receive = intake, receive
        self.size, self._is_complete = 0, False
        # One deadline for the whole body: a byte per second must not extend it.
        self._end = asyncio.get_running_loop().time() + intake.seconds

    async def receive(self) -> Message:
        if self._is_complete:  # the client's leaving is all that can follow
            return await self._receive()
        message = await self._intake._next(self._receive, self._end)
        self._is_complete = not message.get("more_body", False)
        self._add(len(message.get("body", b"")))
        return message

    def _add(self, size: int) -> None:
        self.size += size
        self._intake.held += size
        # Counted while the body arrives, since a header may name any size.
        if self.size > MAX_BYTES:
            raise HTTPException(
                413, f"the request has more than {MAX_BYTES} bytes: send less at once"
            )
        # Many bodies below the limit can fill the memory together.
        if self._intake.held > self._intake.memory:
            raise HTTPException(
                503,
                f"all requests together have more than {self._intake.memory} bytes: try again "
                "later",
                {"Retry-After": "1"},
            )
