"""Counts the programs that a call compiles."""

from collections.abc import Callable

import jax
import pytest


def compilations(name: str, caplog: pytest.LogCaptureFixture, call: Callable[[], object]) -> int:
    """Returns how many programs with the name of a jitted function a call compiles."""
    caplog.clear()
    with jax.log_compiles():
        call()
    return caplog.text.count(f"Finished XLA compilation of jit({name})")
