"""SIGTERM ends every command within seconds, with one line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

CODE = 128 + 15  # as a shell reports a program that SIGTERM ended
GRACE = 5.0  # seconds in which a command that was stopped may close its files
LINE = "SIGTERM: stopped; the same command continues from what is saved"


class Terminated(KeyboardInterrupt):  # noqa: N818 - not an error
    """This process was asked to end; passes whatever Ctrl-C passes."""


class Handler:
    """A handler of SIGTERM, which prints a line; a second SIGTERM then ends the process at once.

    Python runs a handler, which calls `act`, between two of its own instructions, but a compilation
    may take minutes. So a thread, which the system tells of the signal at once, may print the line
    and call `begin` before.
    """

    def __init__(
        self, line: str, act: Callable[[], None], begin: Callable[[], None] = lambda: None
    ) -> None:
        self.line, self.act, self.begin = line, act, begin
        self._is_first = threading.Lock()

    def announce(self) -> None:
        if self._is_first.acquire(blocking=False):
            print(f"ragrl: {self.line}", file=sys.stderr, flush=True)
            self.begin()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal, in the main thread."""
        del frame
        signal.signal(number, signal.SIG_DFL)
        self.announce()
        self.act()


def _raise() -> None:
    raise Terminated


def _count_seconds() -> None:
    """Ends the process after `GRACE`, also if it waits for threads after `main` has returned."""
    timer = threading.Timer(GRACE, os._exit, [CODE])
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Raises `Terminated` in the body at SIGTERM, and ends the process if it does not end itself.

    A handler that the body sets takes precedence.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        count = 0
        while data := os.read(reading, 1):
            handler = signal.getsignal(signal.SIGTERM)
            if data[0] == signal.SIGTERM and isinstance(handler, Handler):
                count += 1
                if count > 1:  # the handler still waits for the end of a compilation
                    os._exit(CODE)
                handler.announce()
        os.close(reading)

    threading.Thread(target=watch, daemon=True).start()
    former_handler = signal.signal(signal.SIGTERM, Handler(LINE, _raise, _count_seconds))
    former_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former_fd)
        signal.signal(signal.SIGTERM, former_handler)
        os.close(writing)
