"""Turns and targets for tests of the train step, and their batches in one static shape."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from jax_ragrl.learner.gradients import Gradient, add, gradient
from jax_ragrl.learner.packing import Batch, Layout, Turn, by_row, grouped, joined, lay_out, masks
from jax_ragrl.learner.targets import Targets

LAYOUT = Layout(lengths=(48,), tokens=8 * 48)
ROLES = ("planner", "executor")
NOTHING = nnx.State({})
WIDTH = 8


def ids(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    return tuple(rng.integers(3, 250, n).tolist())


def siblings(seed: int = 0) -> list[Turn]:
    """Four actions after one prompt, two of them equal, and two after another."""
    rng = np.random.default_rng(seed)
    one, other = ids(rng, 11), ids(rng, 20)
    actions = [ids(rng, n) for n in (4, 7, 1, 6, 5)]
    turns = [(one, 0), (one, 1), (one, 2), (one, 1), (other, 3), (other, 4)]
    return [Turn(i, ROLES[p is other], p, actions[k]) for i, (p, k) in enumerate(turns)]


def conversation(seed: int = 0) -> list[Turn]:
    """Two rollouts of three turns after one prompt, with something observed between turns."""
    rng = np.random.default_rng(seed)
    prompt, turns = ids(rng, 9), []
    for _ in range(2):
        context = prompt
        for _ in range(3):
            turns.append(Turn(len(turns), "planner", context, ids(rng, 3)))
            context = turns[-1].context() + ids(rng, 4)
    return turns


def strangers(seed: int = 0) -> list[Turn]:
    """Turns that share nothing and lie packed in rows."""
    rng = np.random.default_rng(seed)
    return [Turn(i, ROLES[i % 2], ids(rng, 5 + i), ids(rng, 1 + i)) for i in range(7)]


def together(turns: list[Turn]) -> list[Batch]:
    return lay_out(grouped(turns, LAYOUT), ROLES, LAYOUT)


def apart(turns: list[Turn]) -> list[Batch]:
    """Every turn in a row, and in a batch, of its own."""
    return [batch for turn in turns for batch in together([turn])]


def targets_of(batches: list[Batch], seed: int = 0) -> list[Targets]:
    """Random targets of each node, weights included, wherever its tokens lie."""
    actions, mask_AT = joined(batches), masks(batches, WIDTH)
    draws = [np.random.default_rng([seed, int(node)]) for node in actions.node_A]

    def field(shift: float, scale: float) -> list[np.ndarray]:
        x_AT = np.stack([shift + scale * rng.normal(size=WIDTH) for rng in draws])
        return by_row(batches, np.where(mask_AT, x_AT, 0).astype(np.float32))

    # In the order of the fields: advantage, weight, old and reference log-probabilities, values.
    shapes = [(0, 1), (0.03, 0.01), (-5.7, 0.2), (-5.7, 0.2), (0, 1), (0, 1), (0.03, 0.01)]
    fields = [field(*shape) for shape in shapes]
    return [Targets(*of_one) for of_one in zip(*fields, strict=True)]


def total_gradient(model, batches: list[Batch], objective, targets=None) -> Gradient:
    """The summed gradient of batches and the sums of its metrics."""
    one, tenth = jax.device_put((np.float32(1.0), np.float32(0.1)))
    total = None
    for batch, target in zip(batches, targets or targets_of(batches), strict=True):
        rows, target = jax.device_put((batch.rows, target))
        part = gradient(*model, NOTHING, rows, target, one, tenth, objective=objective)
        total = part if total is None else add(total, part)
    return jax.device_get(total)


def assert_close(found: Gradient, expected: Gradient) -> None:
    """Sums within 1e-6 of their size, every gradient within 1e-5 of its norm."""
    for name, x in expected.sums.items():
        np.testing.assert_allclose(found.sums[name], x, rtol=2e-6, atol=1e-6, err_msg=name)
    for a, b in zip(jax.tree.leaves(found.grads), jax.tree.leaves(expected.grads), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-9
