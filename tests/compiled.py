"""What a call compiles."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest


def compilations(name: str, caplog: pytest.LogCaptureFixture, call: Callable[[], object]) -> int:
    """How many programs of a jitted function's name a call compiles."""
    caplog.clear()
    with jax.log_compiles():
        call()
    return caplog.text.count(f"Finished XLA compilation of jit({name})")
