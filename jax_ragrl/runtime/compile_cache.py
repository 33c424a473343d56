"""The persistent compilation cache, and the time spent on compiling.

Programs of a sampler or an update are compiled when their shapes are met for the first time, within
the call. `report_compiling` writes a line to the terminal per program that took a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pathlib
import platform
import sys
from collections.abc import Iterator

import jax
import jaxlib
import numpy as np
import tqdm

from jax_ragrl.errors import UserError
from jax_ragrl.runtime.caches import cache_folder
from jax_ragrl.runtime.mappings import free_programs_at_limit
from jax_ragrl.runtime.memory import return_free_memory
from jax_ragrl.runtime.multihost import is_process_zero
from jax_ragrl.runtime.progress import phase

COMPILING = "/jax/core/compile/backend_compile_duration"
MIN_REPORTED_S = 1.0  # a program that compiles faster is not worth a line
FOLDER = "jax_compilation_cache_dir"  # the setting of JAX
HIT = "/jax/compilation_cache/cache_hits"
MAX_BYTES = 4 << 30  # of all programs in the user's cache; those that were used last remain
_durations: list[float] = []
_hits: list[str] = []


def _record(event: str, duration_secs: float, **_: object) -> None:
    if event == COMPILING:
        _durations.append(duration_secs)


def _record_hit(event: str, **_: object) -> None:
    if event == HIT:
        _hits.append(event)


# At import, so that programs compiled before the first question about the time are counted.
jax.monitoring.register_event_duration_secs_listener(_record)
jax.monitoring.register_event_listener(_record_hit)


def compile_seconds() -> float:
    """Returns the seconds this process has spent on compiling or on loading cached programs."""
    return sum(_durations)


def compiled_programs() -> int:
    """Returns how many programs this process has compiled or loaded from a cache."""
    return len(_durations)


@contextlib.contextmanager
def report_compiling(program: str) -> Iterator[None]:
    """Writes a line to stderr if the body spends a second or more on compiling.

    `program` is the kind and the shape of the program that the body calls, such as
    `sampler 16 x 512 + 32, width 4`. Threads that compile at the same time are not told apart.
    """
    before = compile_seconds()
    try:
        with phase(f"compile or run {program}"):
            yield
    finally:
        seconds = compile_seconds() - before
        if seconds:
            free_programs_at_limit()
        if seconds >= MIN_REPORTED_S:
            return_free_memory()
            # Hosts compile the same programs, and a line of each would be noise.
            if is_process_zero():
                tqdm.tqdm.write(f"compiled {program}: {seconds:.1f} s", file=sys.stderr)


def enable_compile_cache(folder: pathlib.Path | None = None) -> None:
    """Caches programs that take over a second to compile in the user's cache folder, if it can be.

    A cache that the user has configured takes precedence; `JAX_COMPILATION_CACHE_DIR=` (empty)
    switches it off. This initializes the devices, so a process must have joined the others before.
    Several processes share the subfolder `compiled` of the work folder `folder`, which the first
    one alone writes.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or getattr(jax.config, FOLDER):
        return
    if jax.process_count() > 1:
        cache = None if folder is None else (folder / "compiled").resolve()
    else:
        cache = _user_cache()
    jax.config.update(FOLDER, None if cache is None else str(cache))


def _user_cache() -> pathlib.Path | None:
    """Returns the user's folder for programs of this machine; None if it cannot be used."""
    try:
        cache = cache_folder() / "compiled" / _machine()
        is_new = not cache.exists()
        # For the user alone: programs are machine code.
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        # JAX's own limit of the size needs locks and a second file per program: after a kill
        # between the two files nothing is written any more.
        files = [(path, path.stat()) for path in cache.parent.glob("*/*-cache")]
        files.sort(key=lambda file: max(file[1].st_atime, file[1].st_mtime), reverse=True)
        sizes = itertools.accumulate(status.st_size for _, status in files)
        for (path, _), total in zip(files, sizes, strict=True):
            if total > MAX_BYTES:
                path.unlink(missing_ok=True)
        refused = cache / "refused"
        if is_new and jax.default_backend() == "cpu" and not _loads_own_programs(cache):
            refused.touch()
        return None if refused.exists() or not os.access(cache, os.W_OK) else cache
    except (OSError, UserError):  # no home, a read-only one, or one that another process cleans
        return None


def _machine() -> str:
    """Names the compiler and the processor: a program may crash on one with other instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        facts = {x for x in lines if x.startswith(("flags", "Features", "model name", "CPU part"))}
    except OSError:  # not Linux
        facts = {platform.machine(), platform.processor()}
    digest = hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()
    return f"jaxlib-{jaxlib.__version__}-{digest[:12]}"


def _loads_own_programs(cache: pathlib.Path) -> bool:
    """Whether this CPU loads what it compiled; some refuse all (jax-ml/jax issue 38445)."""
    names = (FOLDER, "jax_persistent_cache_min_compile_time_secs")
    before, hits = [getattr(jax.config, name) for name in names], len(_hits)
    try:
        for name, value in zip(names, (str(cache), 0.0), strict=True):
            jax.config.update(name, value)
        for _ in range(2):  # equal programs, the second one from the cache
            jax.jit(lambda x: x + 1).lower(np.float32(1)).compile()
        return len(_hits) > hits
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
