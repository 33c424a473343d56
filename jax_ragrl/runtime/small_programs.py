"""Programs of small models on a CPU, several of which run at the same time.

A product of small matrices is not divided over the cores of a CPU, so that a program of a small
model uses one core. A CPU runs programs that one thread starts one after another, and programs that
several threads start at the same time.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jax.sharding import Mesh

from jax_ragrl.runtime.free_work import count_elements
from jax_ragrl.runtime.sharding import mesh_context, target_platform

T = TypeVar("T")

# Parameters of a model up to which its programs use one core of a CPU.
ONE_CORE_PARAMETERS = 2**24

_thread = threading.local()


def uses_one_core(model: Any, mesh: Mesh | None = None) -> bool:
    """Returns whether the programs of a model leave all cores of a CPU but one idle.

    `model` is a tree of its parameters. Without a mesh, the one that is set counts.
    """
    with mesh_context(mesh):
        is_cpu = target_platform() == "cpu"
    is_one_device = mesh is None or mesh.size == 1
    return is_cpu and is_one_device and count_elements(model) <= ONE_CORE_PARAMETERS


def start(programs: Callable[[], T], *, concurrently: bool) -> T:
    """Returns the result of `programs`, which starts programs without waiting for them.

    With `concurrently` another thread calls it than for the call before, so that its programs may
    run during those of earlier calls.
    """
    # A starter that waited for another one could wait for itself.
    if not concurrently or getattr(_thread, "is_starter", False):
        return programs()
    return next(_starters()).submit(programs).result()


def _starters() -> Iterator[ThreadPoolExecutor]:
    """Threads that start programs in turn, one per core, for the thread that calls this.

    Threads that share them would wait for each other: a rollout for all programs of an update.
    """

    def become_starter() -> None:
        _thread.is_starter = True

    if not hasattr(_thread, "starters"):
        pools = (ThreadPoolExecutor(1, "starter", become_starter) for _ in range(count_cores()))
        _thread.starters = itertools.cycle([*pools])
    starters: Iterator[ThreadPoolExecutor] = _thread.starters
    return starters


def count_cores() -> int:
    """Returns the number of cores that the process may use."""
    # macOS and Windows have no affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
