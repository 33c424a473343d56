"""Checkpoints of a small tree: what is kept, what is read, what is refused."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints


class Tree(NamedTuple):
    """Its fields are not in alphabetical order."""

    second: jax.Array
    first: jax.Array


def tree(value: float, size: int = 2) -> Tree:
    return jax.device_put(Tree(np.full(size, value, np.float32), np.full(size, -value, np.float32)))


def test_a_step_is_read_as_it_was_saved_and_the_last_two_are_kept(tmp_path):
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


def test_of_a_part_only_its_own_paths_are_read_and_they_have_to_fit(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, {"a": tree(1), "b": tree(2, 3)}, {})
        found = checkpoints.restore_part(1, {"b": tree(0, 3)})
        assert jax.device_get(found["b"].first).tolist() == [-2] * 3
        with pytest.raises(UserError, match=r"b/first of shape \[3\], .* makes \[2\]"):
            checkpoints.restore_part(1, {"b": tree(0)})
        with pytest.raises(UserError, match=r"c/first of shape None, .* makes \[2\]"):
            checkpoints.restore_part(1, {"c": tree(0)})
        with pytest.raises(UserError, match=r"a/first of shape \[2\], .* makes None"):
            checkpoints.restore(1, {"b": tree(0, 3)})
