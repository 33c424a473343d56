"""Dynamic batching: one worker thread whose next batch is what arrives while it works."""

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
    """A queue of items that one thread processes in batches.

    Args:
      work: gives one result per item, in order, with an exception in place of a failed one.
      batch: max items per batch.
      waiting: max items in the queue.

    Attributes:
      seconds: duration of the last batch.
    """

    def __init__(
        self, work: Callable[[Sequence[T]], Sequence[R | Exception]], batch: int, waiting: int
    ) -> None:
        self._work, self._batch, self._waiting = work, batch, waiting
        self._queue: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self.seconds = 0.0
        # A daemon thread does not keep alive a process that fails before it calls `close`.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, items: Sequence[T]) -> list[Future[R]]:
        """Queues all items or none, and returns their future results. Not thread-safe.

        Raises:
          queue.Full: the queue has no room for the items.
        """
        if len(self) + len(items) > self._waiting:
            raise queue.Full
        futures: list[Future[R]] = [Future() for _ in items]
        for pair in zip(items, futures, strict=True):
            self._queue.put(pair)
        return futures

    def __len__(self) -> int:
        """The number of queued items."""
        return self._queue.qsize()

    def close(self, seconds: float | None = None) -> bool:
        """Processes all queued items, then stops the thread; whether it ended within `seconds`."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while batch := self._next():
            start = time.monotonic()
            # Skips the futures that their clients have cancelled.
            active = [pair for pair in batch if pair[1].set_running_or_notify_cancel()]
            results = self._results([item for item, _ in active])
            self.seconds = time.monotonic() - start
            for (_, future), result in zip(active, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _next(self) -> list[tuple[T, Future[R]]]:
        """Waits for an item and returns it with all others that are queued; empty after `close`."""
        pair, batch = self._queue.get(), []
        with contextlib.suppress(queue.Empty):
            while pair is not None:
                batch.append(pair)
                if len(batch) == self._batch:
                    return batch
                pair = self._queue.get_nowait()
            if batch:
                self._queue.put(None)  # keeps the end marker for the call after this batch
        return batch

    def _results(self, items: Sequence[T]) -> Sequence[R | Exception]:
        """The results of a batch; if it fails, of each item separately, to isolate the failure."""
        try:
            return self._work(items) if items else []
        except Exception as error:
            # 1. Retry each item alone, so that one bad item fails alone.
            # 2. Log an item that fails alone: an unexpected error is a bug.
            if len(items) > 1:
                return [self._results([item])[0] for item in items]
            logging.getLogger(__name__).exception("this item failed: %r", items[0])
            return [error]
