"""An adaptive limit of requests in flight to one server (AIMD, as in TCP)."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

START = 4  # requests in flight at first; a server on one processor may work on no more
PROMPT = 0.25  # of the time-out: a server whose replies take longer already queues the requests


class Gate:
    """Bounds requests in flight by a limit between 1 and a maximum.

    As in the congestion control of TCP (Jacobson 1988), the limit doubles with each round of
    replies that come soon until the server is overloaded for the first time. Each overload halves
    it, and from the first one on it rises by one per round. A request fails after
    `timeout` seconds.
    """

    def __init__(self, most: int, timeout: float) -> None:
        self._most, self._soon = most, PROMPT * timeout
        self.limit = float(min(START, most))
        self._in_flight, self._halved = 0, -1.0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # a heap

    @asynccontextmanager
    async def slot(self, rank: int) -> AsyncIterator[None]:
        """Waits until a further request may be in flight, and counts it.

        The lowest of distinct ranks is the next: a request that is tried again precedes later ones.
        """
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            # A request that is canceled while it waits has a canceled future.
            self._in_flight -= not turn.cancelled()
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._in_flight < int(self.limit):
            _, turn = heapq.heappop(self._waiting)
            if not turn.cancelled():
                self._in_flight += 1
                turn.set_result(None)

    def count_reply(self, start: float) -> None:
        """Counts a reply to a request that was sent at `start`, by `time.monotonic()`."""
        if time.monotonic() - start < self._soon:
            step = 1.0 if self._halved < 0 else 1.0 / self.limit
            self.limit = min(self.limit + step, float(self._most))

    def count_overload(self, start: float) -> None:
        """Halves the limit, once for all requests in flight together; `start` as above."""
        if start > self._halved:
            self.limit = max(self.limit / 2, 1.0)
            self._halved = time.monotonic()
