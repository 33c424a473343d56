"""Compiled programs kept beside what a run makes: started again, it does not compile them again."""

from __future__ import annotations

import pathlib

import jax


def keep_programs(folder: pathlib.Path) -> None:
    """Programs that take over a second to compile are kept in `folder/compiled` from here on.

    All hosts of a run read them there, and the first one writes. A place that the user has chosen
    (`JAX_COMPILATION_CACHE_DIR`) comes first. A CPU compiles in seconds what others take minutes
    for, and does not always accept what it compiled itself (jax-ml/jax issue 38445): without such a
    choice it keeps nothing. Asks for the devices, so a process has joined the others before.
    """
    if jax.config.jax_compilation_cache_dir is None and jax.default_backend() != "cpu":
        jax.config.update("jax_compilation_cache_dir", str((folder / "compiled").resolve()))
