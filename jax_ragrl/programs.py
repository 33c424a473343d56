"""Compiled programs kept beside what a run makes: started again, it does not compile them again."""

from __future__ import annotations

import os
import pathlib

import jax


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
