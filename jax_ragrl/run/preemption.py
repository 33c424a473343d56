"""Notices that ask a run to stop: a cloud sends SIGTERM before it takes a machine back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from jax_ragrl.runtime.stopping import Handler

LINE = "SIGTERM: stops after its step, which is saved; a second one ends at once"


class StopNotice:
    """Whether this run was asked to stop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def reached(self, step: int) -> bool:
        """Returns whether to save after `step` steps and stop; equal on all processes."""
        if jax.process_count() > 1:
            # JAX's service receives the signal of any process and agrees on one step.
            return multihost_utils.reached_preemption_sync_point(step)
        return self._event.is_set()

    def set(self) -> None:
        """Asks the run to stop after its current step."""
        self._event.set()


@contextlib.contextmanager
def stop_notice() -> Iterator[StopNotice]:
    """Catches the first SIGTERM of this process; a second one ends the process at once."""
    notice = StopNotice()
    # Only the main thread may set handlers; with several processes JAX has its own.
    if threading.current_thread() is not threading.main_thread() or jax.process_count() > 1:
        yield notice
        return

    previous = signal.signal(signal.SIGTERM, Handler(LINE, notice.set))
    try:
        yield notice
    finally:
        signal.signal(signal.SIGTERM, previous)
