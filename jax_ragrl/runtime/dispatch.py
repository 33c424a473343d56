"""One order of programs on all devices of a process, whichever thread starts them.

A program on several devices may wait in a collective until all of them run it. If two threads start
two such programs, one device could get them in one order and another device in the other, and each
would wait for the other forever. So every compiled function that may run on a mesh is `in_order`: a
thread hands its program to all devices before another thread hands over its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

F = TypeVar("F", bound=Callable[..., Any])

# A program may be traced while another one is: the inner call comes from the same thread.
_START = threading.RLock()


class OrderedProgram:
    """A jitted function whose calls start their programs in one order on all devices."""

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program
        functools.update_wrapper(self, program)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _START if _has_several_devices() else contextlib.nullcontext():
            return self._program(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def in_order(program: F) -> F:
    """Orders the calls of a jitted function with the calls of all other functions `in_order`."""
    return cast(F, OrderedProgram(program))


def is_on_device(model: Any) -> bool:
    """Returns whether a model or a retriever has `on_device`: its programs need the one order."""
    return bool(getattr(model, "on_device", False))


@functools.cache
def _has_several_devices() -> bool:
    # One device runs programs in the order of their start anyway, and starting may take long there:
    # a CPU computes small programs at once.
    return jax.local_device_count() > 1
