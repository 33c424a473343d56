"""Progress of long loops on stderr: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import tqdm

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 30.0


class Progress(Protocol):
    """Counts finished units of work."""

    def update(self, count: int) -> object:
        """Adds finished units."""
        ...


class Lines:
    """Prints how far a loop is, its rate and the time left, at most once per 30 seconds.

    A loop that ends earlier prints nothing.
    """

    def __init__(
        self,
        label: str,
        unit: str,
        total: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the clock.

        Args:
          label: the first word of a line.
          unit: of the work, in singular.
          total: number of units; None if it is unknown.
          clock: returns seconds.
        """
        self._label, self._unit, self._total, self._clock = label, unit, total, clock
        self._done, self._start = 0, clock()
        self._last = self._start

    def update(self, count: int) -> None:
        """Adds finished units, and prints a line if it is time."""
        self._done += count
        now = self._clock()
        if now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        print(f"ragrl: {self._line(now - self._start)}", file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        rate = self._done / seconds
        goal = "" if self._total is None else f" of {self._total:,}"
        line = f"{self._label}: {self._done:,}{goal} {self._unit}s, {rate:,.1f} per s"
        if self._total is None or not rate:
            return line
        return f"{line}, about {duration((self._total - self._done) / rate)} left"


def duration(seconds: float) -> str:
    """Returns a duration in the largest unit that is contained at least twice."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextlib.contextmanager
def progress(label: str, unit: str, total: int | None = None) -> Iterator[Progress]:
    """Returns the progress of a loop, which prints for as long as the context is open.

    Args:
      label: the first word of bar and lines.
      unit: of the work, in singular.
      total: number of units; None if it is unknown.
    """
    if not sys.stderr.isatty():
        yield Lines(label, unit, total)
        return
    with tqdm.tqdm(total=total, desc=label, unit=unit) as bar:
        yield bar


def track(items: Iterable[T], label: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yields items and shows their progress, as `progress` does.

    Args:
      items: of the loop.
      label: the first word of bar and lines.
      unit: of one item, in singular.
      total: number of items; None if it is unknown.
    """
    with progress(label, unit, total) as bar:
        for item in items:
            yield item
            bar.update(1)
