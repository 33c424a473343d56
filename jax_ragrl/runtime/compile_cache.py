"""Compiled programs: kept beside what a run makes, so that it compiles them once; their time."""

from __future__ import annotations

import os
import pathlib

import jax

COMPILING = "/jax/core/compile/backend_compile_duration"
_spent: list[float] = []


def _note(event: str, duration_secs: float, **_: object) -> None:
    if event == COMPILING:
        _spent.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_note)


def compile_seconds() -> float:
    """What this process has spent on compiling so far, or on reading programs that were kept."""
    return sum(_spent)


def keep_programs(folder: pathlib.Path, *, also_cpu: bool = False) -> None:
    """Programs that take over a second to compile are kept in `folder/compiled` from here on.

    All hosts of a run read them there, and the first one writes. A place that the user has chosen
    (`JAX_COMPILATION_CACHE_DIR`) comes first. A CPU compiles in seconds what others take minutes
    for, and does not always accept what it compiled itself (jax-ml/jax issue 38445): its programs
    are kept where that is asked for. Asks for the devices: a process has joined the others before.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not chosen and (also_cpu or jax.default_backend() != "cpu"):
        jax.config.update("jax_compilation_cache_dir", str((folder / "compiled").resolve()))
