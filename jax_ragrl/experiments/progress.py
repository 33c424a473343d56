"""Lines about the time left of a run of several stages, read from the files that stages write."""

from __future__ import annotations

import json
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from jax_ragrl.runtime.jsonl import read_rows

SECONDS_BETWEEN_LINES = 30.0


class Stage(NamedTuple):
    """A stage of a run.

    Fields:
      name: its name in a line.
      minutes: its estimated duration; only the ratios between stages matter.
      done: returns the finished fraction, 0 to 1, from the files of the work folder.
    """

    name: str
    minutes: float
    done: Callable[[pathlib.Path], float]


def rows_of(file: str, total: int) -> Callable[[pathlib.Path], float]:
    """Returns the fraction of `total` rows that a JSONL file of the work folder has."""
    return lambda folder: min(1.0, sum(1 for _ in read_rows(folder / file)) / total)


def exists(file: str) -> Callable[[pathlib.Path], float]:
    """Returns 1 if the work folder has a file, otherwise 0."""
    return lambda folder: float((folder / file).exists())


def keys_of(file: str, total: int) -> Callable[[pathlib.Path], float]:
    """Returns the fraction of `total` keys that a JSON object of the work folder has."""

    def done(folder: pathlib.Path) -> float:
        path = folder / file
        keys = len(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else 0
        return min(1.0, keys / total)

    return done


def training_of(folder: str, total: int) -> Callable[[pathlib.Path], float]:
    """Returns the fraction of about `total` supervised steps; 1 if there is a checkpoint."""
    steps, complete = rows_of(f"{folder}/metrics.jsonl", total), exists(f"{folder}/checkpoint")
    # Without a checkpoint something is left to do, even if the number of steps was too low.
    return lambda workdir: complete(workdir) or min(steps(workdir), 0.99)


def remaining(stages: tuple[Stage, ...], workdir: pathlib.Path) -> tuple[float, str]:
    """Returns the minutes of all unfinished work, and the name of the current stage.

    Args:
      stages: all stages in order.
      workdir: the work folder.
    """
    # A later stage proves that the earlier ones are complete, even if they leave no file.
    fractions = [stage.done(workdir) for stage in stages]
    for i in reversed(range(len(stages) - 1)):
        fractions[i] = 1.0 if fractions[i + 1] > 0 else fractions[i]
    rest = sum(stage.minutes * (1 - f) for stage, f in zip(stages, fractions, strict=True))
    names = (stage.name for stage, f in zip(stages, fractions, strict=True) if f < 1)
    return rest, next(names, "the end")


class WorkClock:
    """Estimates the time left from the work that is done and the time that it took.

    Work is known to be done only when a stage writes a row. The pace is measured at these moments:
    measured between them, it would fall with every minute of a long stage.
    """

    def __init__(self, work: float) -> None:
        """Sets the work at the start, in estimated minutes."""
        self._work, self._rest, self._minutes = work, work, 0.0

    def minutes_left(self, rest: float, minutes: float) -> float:
        """Returns the estimated minutes left.

        Args:
          rest: the unfinished work, in estimated minutes.
          minutes: the minutes since the start.
        """
        # Only a smaller rest is news: the pace is that of the finished work.
        if rest < self._rest:
            self._rest, self._minutes = rest, minutes
        done = self._work - self._rest
        # Until some work is done, the estimate is taken as it is.
        pace = self._minutes / done if done > 1 else 1.0
        # A unit of work that takes longer than expected still has something left.
        return max(self._rest * pace - (minutes - self._minutes), 0.5 * self._rest * pace)


class TimeLeft:
    """A context in which a line per `SECONDS_BETWEEN_LINES` shows the stage and the time left.

    The first line comes at once, with the estimate. Later lines scale it by the speed of this
    machine so far.
    """

    def __init__(self, stages: tuple[Stage, ...], workdir: pathlib.Path) -> None:
        """Sets the stages and the work folder, which need not exist."""
        self._stages, self._workdir = stages, workdir
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> TimeLeft:
        """Starts the lines."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the lines."""
        self._end.set()
        self._thread.join()

    def _report(self) -> None:
        start, (work, _) = time.monotonic(), remaining(self._stages, self._workdir)
        clock = WorkClock(work)
        while True:
            rest, name = remaining(self._stages, self._workdir)
            rest_minutes = clock.minutes_left(rest, (time.monotonic() - start) / 60)
            print(f"{name}: about {rest_minutes:.0f} min left", file=sys.stderr, flush=True)
            if self._end.wait(SECONDS_BETWEEN_LINES):
                return
