"""Seconds of a rollout by the cause of waiting: the devices, servers or its own work on the host.

The calls of a rollout overlap: some branches wait for the language model while others search. An
instant belongs to the first of these causes that has a call in progress, so the seconds of all
causes add up to the duration of the rollout:

    device      the sampler, or a model or a search on its devices
    llm         a language model or a judge on other machines, or without devices, or a tool
    retriever   a search
    host        none of them: the code of the system, texts, parsing
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator

DEVICE, LLM, RETRIEVER, HOST = CAUSES = ("device", "llm", "retriever", "host")


class RolloutStoppedError(Exception):
    """A rollout whose result nobody needs was stopped."""


class WaitingTimes:
    """Measures the causes of one rollout from now on, and can stop it."""

    def __init__(self) -> None:
        self._lock, self._last = threading.Lock(), time.perf_counter()
        self._calls = collections.Counter[str]()
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._is_stopped = False

    @contextlib.contextmanager
    def call(self, cause: str) -> Iterator[None]:
        """Measures a call.

        Raises:
          RolloutStoppedError: the rollout was stopped before the call.
        """
        if self._is_stopped:
            raise RolloutStoppedError
        self._count(cause, 1)
        try:
            yield
        finally:
            self._count(cause, -1)

    def _count(self, cause: str, difference: int) -> dict[str, float]:
        """Adds the time since the latest change to its cause; returns the seconds until now."""
        with self._lock:
            now = time.perf_counter()
            current = next((c for c in CAUSES if self._calls[c]), HOST)
            self._seconds[current] += now - self._last
            self._last = now
            self._calls[cause] += difference
            return dict(self._seconds)

    def stop(self) -> None:
        """Lets the rollout end at its next call."""
        self._is_stopped = True

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each cause until now."""
        return self._count(HOST, 0)
