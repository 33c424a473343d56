"""The persistent compilation cache of a run, and the time spent on compiling."""

from __future__ import annotations

import os
import pathlib

import jax

COMPILING = "/jax/core/compile/backend_compile_duration"
_durations: list[float] = []


def _record(event: str, duration_secs: float, **_: object) -> None:
    if event == COMPILING:
        _durations.append(duration_secs)


# At import, so that programs compiled before the first question about the time are counted.
jax.monitoring.register_event_duration_secs_listener(_record)


def compile_seconds() -> float:
    """Returns the seconds this process has spent on compiling or on loading cached programs."""
    return sum(_durations)


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
    configured = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not configured and (also_cpu or jax.default_backend() != "cpu"):
        jax.config.update("jax_compilation_cache_dir", str((folder / "compiled").resolve()))
