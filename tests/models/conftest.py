"""Tests of models compile more than they run, so XLA does not optimize their programs."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def unoptimized():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
