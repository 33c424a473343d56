"""Requests in flight to one server: as many as the server answers without complaint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

START = 32  # requests in flight at first: enough to see how the server copes
PROMPT = 0.25  # of the time-out: a server whose replies take longer already queues the requests


class Gate:
    """Bounds requests in flight by a limit between 1 and a maximum.

    As in the congestion control of TCP (Jacobson 1988), the limit doubles with each round of
    replies that come soon until the server is overloaded for the first time. Each overload halves
    it, and from the first one on it rises by one per round.

    Args:
      most: the maximum.
      timeout: seconds after which a request fails.
    """

    def __init__(self, most: int, timeout: float) -> None:
        self._most, self._soon = most, PROMPT * timeout
        self.limit = float(min(START, most))
        self._in_flight, self._halved = 0, -1.0
        self._change = asyncio.Condition()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits until a further request may be in flight, and counts it."""
        async with self._change:
            await self._change.wait_for(lambda: self._in_flight < int(self.limit))
            self._in_flight += 1
        try:
            yield
        finally:
            async with self._change:
                self._in_flight -= 1
                # A reply may have raised the limit too: two can start.
                self._change.notify(2)

    def count_reply(self, start: float) -> None:
        """Counts a reply.

        Args:
          start: `time.monotonic()` when the request was sent.
        """
        if time.monotonic() - start < self._soon:
            step = 1.0 if self._halved < 0 else 1.0 / self.limit
            self.limit = min(self.limit + step, float(self._most))

    def count_overload(self, start: float) -> None:
        """Halves the limit, once for all requests that were in flight together.

        Args:
          start: `time.monotonic()` when the request was sent.
        """
        if start > self._halved:
            self.limit = max(self.limit / 2, 1.0)
            self._halved = time.monotonic()
