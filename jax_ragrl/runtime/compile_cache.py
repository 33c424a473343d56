"""The persistent compilation cache of a run, and the time spent on compiling.

Programs of a sampler or an update are compiled when their shapes are met for the first time, within
the call. `report_compiling` writes a line to the terminal per program that took a second.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

import jax
import tqdm

from jax_ragrl.runtime.mappings import free_programs_at_limit
from jax_ragrl.runtime.memory import return_free_memory
from jax_ragrl.runtime.multihost import is_process_zero

COMPILING = "/jax/core/compile/backend_compile_duration"
MIN_REPORTED_S = 1.0  # a program that compiles faster is not worth a line
_durations: list[float] = []


def _record(event: str, duration_secs: float, **_: object) -> None:
    if event == COMPILING:
        _durations.append(duration_secs)


# At import, so that programs compiled before the first question about the time are counted.
jax.monitoring.register_event_duration_secs_listener(_record)


def compile_seconds() -> float:
    """Returns the seconds this process has spent on compiling or on loading cached programs."""
    return sum(_durations)


def compiled_programs() -> int:
    """Returns how many programs this process has compiled or loaded from a cache."""
    return len(_durations)


@contextlib.contextmanager
def report_compiling(program: str) -> Iterator[None]:
    """Writes a line to stderr if the body spends a second or more on compiling.

    Threads that compile at the same time are not told apart.

    Args:
      program: the kind and the shape of the program that the body calls, such as
        `sampler 16 x 512 + 32, width 4`.
    """
    before = compile_seconds()
    try:
        yield
    finally:
        seconds = compile_seconds() - before
        if seconds:
            free_programs_at_limit()
        if seconds >= MIN_REPORTED_S:
            return_free_memory()
            # Hosts compile the same programs, and a line of each would be noise.
            if is_process_zero():
                # Through `tqdm`, so that the line does not break a progress bar.
                tqdm.tqdm.write(f"compiled {program}: {seconds:.1f} s", file=sys.stderr)


def enable_compile_cache(folder: pathlib.Path, *, also_cpu: bool = False) -> None:
    """Caches programs that take over a second to compile in `folder/compiled`.

    All hosts of a run read the cache, and the first one writes it. A cache that the user has
    configured (`JAX_COMPILATION_CACHE_DIR`) takes precedence. This initializes the devices, so a
    process must have joined the others before.

    Args:
      folder: the work folder of the run.
      also_cpu: cache programs for the CPU too. By default they are not cached: a CPU compiles in
        seconds what other devices compile in minutes, and does not always accept a program that it
        compiled itself (jax-ml/jax issue 38445).
    """
    user_cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not user_cache and (also_cpu or jax.default_backend() != "cpu"):
        jax.config.update("jax_compilation_cache_dir", str((folder / "compiled").resolve()))
