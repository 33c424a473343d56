"""Tests of models compile much and run little: they ask XLA for no optimization."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def unoptimized():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
