"""Checkpoints of a small tree are retained, restored or refused."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints


class Tree(NamedTuple):
    """A tree whose fields are not in alphabetical order."""

    second: jax.Array
    first: jax.Array


def tree(value: float, size: int = 2) -> Tree:
    return jax.device_put(Tree(np.full(size, value, np.float32), np.full(size, -value, np.float32)))


def test_a_step_is_restored_exactly_and_two_are_retained(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 2, 3):
            checkpoints.save(step, tree(step), {"data": f"at {step}"})
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.latest() == 3
        assert sorted(x.name for x in checkpoints.folder.iterdir()) == ["2", "3"]
        for step in (2, 3):
            state, meta = checkpoints.restore(step, tree(0))
            assert (meta["step"], meta["data"]) == (step, f"at {step}")
            assert [x.tolist() for x in jax.device_get(state)] == [[step] * 2, [-step] * 2]


def test_a_part_restores_its_own_paths_only(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, {"a": tree(1), "b": tree(2, 3)}, {})
        part = checkpoints.restore_part(1, {"b": tree(0, 3)})
        assert jax.device_get(part["b"].first).tolist() == [-2] * 3
        with pytest.raises(UserError, match=r"b/first of shape \[3\], .* needs \[2\]"):
            checkpoints.restore_part(1, {"b": tree(0)})
        with pytest.raises(UserError, match=r"c/first of shape None, .* needs \[2\]"):
            checkpoints.restore_part(1, {"c": tree(0)})
        with pytest.raises(UserError, match=r"a/first of shape \[2\], .* needs None"):
            checkpoints.restore(1, {"b": tree(0, 3)})
