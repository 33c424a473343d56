"""One thread that does what is asked of it: what comes while it works is its next batch."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Args:
    work: a result an item, in order, an exception in place of one that failed.
    batch: items done together at most.
    waiting: items in the queue at most.

    `seconds` is how long the last batch took.
    """

    def __init__(
        self, work: Callable[[Sequence[T]], Sequence[R | Exception]], batch: int, waiting: int
    ) -> None:
        self._work, self._batch, self._waiting = work, batch, waiting
        self._queue: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self.seconds = 0.0
        # A daemon, so that a process that fails before it closes this one ends all the same.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, items: Sequence[T]) -> list[Future[R]]:
        """What will become of each item. All come into the queue, or none; from one thread only.

        Raises:
          queue.Full: there is no room for them.
        """
        if len(self) + len(items) > self._waiting:
            raise queue.Full
        futures: list[Future[R]] = [Future() for _ in items]
        for pair in zip(items, futures, strict=True):
            self._queue.put(pair)
        return futures

    def __len__(self) -> int:
        """How many wait."""
        return self._queue.qsize()

    def close(self) -> None:
        """Returns when all that was submitted is done."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            start = time.monotonic()
            live = [pair for pair in batch if pair[1].set_running_or_notify_cancel()]
            results = self._results([item for item, _ in live])
            self.seconds = time.monotonic() - start
            for (_, future), result in zip(live, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _next(self) -> list[tuple[T, Future[R]]]:
        """What waits, once something does; nothing where all is done."""
        pair, batch = self._queue.get(), []
        with contextlib.suppress(queue.Empty):
            while pair is not None:
                batch.append(pair)
                if len(batch) == self._batch:
                    return batch
                pair = self._queue.get_nowait()
            if batch:
                self._queue.put(None)  # the end, to be met again after this batch
        return batch

    def _results(self, items: Sequence[T]) -> Sequence[R | Exception]:
        """An item that breaks the work breaks nobody else's."""
        try:
            return self._work(items) if items else []
        except Exception as error:
            if len(items) > 1:
                return [self._results([item])[0] for item in items]
            logging.getLogger(__name__).exception("this failed by itself: %r", items[0])
            return [error]
