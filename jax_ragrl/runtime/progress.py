"""Progress of a command on stderr: bars on a terminal, and elsewhere a line when all was silent.

A command (`cli.main`) opens a `heartbeat`, long loops in it open `progress`, and single programs a
`phase`. A thread says how far they are when nothing was printed for `SILENCE` seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import tqdm

T = TypeVar("T")

SILENCE = 15.0  # seconds; with the time of a look it stays below 20
LOOK = 1.0  # seconds between two looks of the thread
SHORT = 5.0  # seconds; an inner loop that ends earlier has no bar

_open: list[Task] = []  # outermost first; threads share it
_lock = threading.Lock()
_is_over = threading.Event()  # of the one heartbeat
_last_output = time.monotonic()


class Task:
    """Work in progress: a loop that counts finished units, or something without a count."""

    def __init__(
        self,
        label: str,
        unit: str = "",
        total: int | None = None,
        initial: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.unit, self.done, self._initial = label, unit, initial, initial
        self._total, self._clock, self._start = total, clock, clock()
        self._latest = self._start  # time of the latest unit
        self.bar: tqdm.tqdm[None] | None = None

    def update(self, count: int) -> None:
        self.done, self._latest = self.done + count, self._clock()
        if self.bar is not None:
            self.bar.update(count)

    def describe(self, label: str) -> None:
        self.label = label
        if self.bar is not None:
            self.bar.set_description(label)

    def line(self) -> str:
        """Returns how far the work is, its rate and the time left."""
        seconds, done = self._clock() - self._start, self.done - self._initial
        if not self.unit:
            return f"{self.label}: {duration(seconds)} so far"
        goal = "" if self._total is None else f" of {self._total:,}"
        units = self.unit + ("es" if self.unit.endswith("ch") else "s")
        line = f"{self.label}: {self.done:,}{goal} {units}"
        if not done or not seconds:
            return f"{line}, {duration(seconds)} so far"
        # The time since the latest unit belongs to the next one, unless that is overdue.
        waited = seconds - (self._latest - self._start)
        per_unit = (seconds - waited) / done
        if waited >= per_unit:
            waited, per_unit = 0.0, seconds / done
        pace = 1 / per_unit
        line += f", {pace:,.1f} per s" if pace >= 1 else f", {per_unit:.1f} s per {self.unit}"
        if self._total is None or self.done >= self._total:
            return line
        return f"{line}, about {duration((self._total - self.done) * per_unit - waited)} left"


def duration(seconds: float) -> str:
    """Returns a duration in the largest unit that is contained at least twice."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextlib.contextmanager
def phase(label: str) -> Iterator[None]:
    """Names work without a count, for as long as the context is open."""
    with _opened(Task(label)):
        yield


@contextlib.contextmanager
def progress(
    label: str, unit: str, total: int | None = None, *, initial: int = 0
) -> Iterator[Task]:
    """Returns the progress of a loop, which is shown for as long as the context is open.

    `label` begins bar and lines, `unit` is singular, and `initial` units were finished before.
    """
    task = Task(label, unit, total, initial)
    if not (sys.stderr and sys.stderr.isatty()):
        # A program that calls the library has no command that keeps one.
        with contextlib.nullcontext() if _open else heartbeat(label), _opened(task):
            yield task
        return
    is_inner = any(other.bar is not None for other in _open)
    options = {"leave": not is_inner, "delay": SHORT if is_inner else 0}
    with (
        tqdm.tqdm(total=total, desc=label, unit=unit, initial=initial, **options) as task.bar,
        _opened(task),
    ):
        yield task


def track(items: Iterable[T], label: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yields items and shows their progress, as `progress` does."""
    with progress(label, unit, total) as task:
        for item in items:
            yield item
            task.update(1)


def advance(unit: str, count: int) -> None:
    """Adds finished units to the innermost open loop that counts them, if there is one."""
    with _lock:
        task = next((task for task in reversed(_open) if task.unit == unit), None)
    if task is not None and count:
        task.update(count)


@contextlib.contextmanager
def heartbeat(command: str) -> Iterator[None]:
    """Prints a line whenever nothing was printed for `SILENCE` seconds."""
    global _last_output
    _last_output = time.monotonic()

    def look() -> None:
        while not _is_over.wait(LOOK):
            if time.monotonic() - _last_output >= SILENCE:
                with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more
                    beat()

    streams = {id(stream): stream for stream in (sys.stdout, sys.stderr) if stream}.values()
    thread = threading.Thread(target=look, name="heartbeat", daemon=True)
    with _opened(Task(command)):
        for stream in streams:
            # The attribute of the instance hides the method of its class.
            setattr(stream, "write", _noting(stream.write))  # noqa: B010
        _is_over.clear()
        thread.start()
        try:
            yield
        finally:
            _is_over.set()
            thread.join()
            for stream in streams:
                delattr(stream, "write")


def beat() -> None:
    """Says how far the open work is; a terminal with bars has them drawn again."""
    with _lock:
        tasks = [*_open]
    if bars := [task.bar for task in tasks if task.bar is not None]:
        for bar in bars:
            bar.refresh()
    elif tasks:
        # The name of the command alone says less than any work within it.
        lines = dict.fromkeys(task.line() for task in tasks[1:] or tasks)
        print(f"ragrl: {'; '.join(lines)}", file=sys.stderr, flush=True)


def fall_silent() -> None:
    """Ends the lines of a command that waits for others from now on, as a server does."""
    _is_over.set()


def _noting(write: Callable[[str], int]) -> Callable[[str], int]:
    def write_and_note(text: str) -> int:
        global _last_output
        _last_output = time.monotonic()
        return write(text)

    return write_and_note


@contextlib.contextmanager
def _opened(task: Task) -> Iterator[Task]:
    with _lock:
        _open.append(task)
    try:
        yield task
    finally:
        with _lock:
            _open.remove(task)
