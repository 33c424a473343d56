"""Turns and targets for tests of the train step, and their batches in one static shape."""

import jax
import numpy as np

from jax_ragrl.learner.gradients import Gradient, add, gradient
from jax_ragrl.learner.packing import Batch, Layout, Minibatches, Turn, group_turns, lay_out
from jax_ragrl.learner.targets import Targets
from jax_ragrl.models.split import SplitModel

LAYOUT = Layout(row_lengths=(48,), tokens_per_device=8 * 48)
ROLES = ("planner", "executor")
WIDTH = 8  # no action is longer


def ids(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    return tuple(rng.integers(3, 250, n).tolist())


def siblings(seed: int = 0) -> list[Turn]:
    """Returns four actions after one prompt, two of them equal, and two after another prompt."""
    rng = np.random.default_rng(seed)
    one, other = ids(rng, 11), ids(rng, 20)
    actions = [ids(rng, n) for n in (4, 7, 1, 6, 5)]
    turns = [(one, 0), (one, 1), (one, 2), (one, 1), (other, 3), (other, 4)]
    return [Turn(i, ROLES[p is other], p, actions[k]) for i, (p, k) in enumerate(turns)]


def conversation(seed: int = 0) -> list[Turn]:
    """Returns two rollouts of three turns each after one prompt, with observations in between."""
    rng = np.random.default_rng(seed)
    prompt, turns = ids(rng, 9), []
    for _ in range(2):
        context = prompt
        for _ in range(3):
            turns.append(Turn(len(turns), "planner", context, ids(rng, 3)))
            context = turns[-1].context() + ids(rng, 4)
    return turns


def strangers(seed: int = 0) -> list[Turn]:
    """Returns turns without common prefixes, which are packed into rows."""
    rng = np.random.default_rng(seed)
    return [Turn(i, ROLES[i % 2], ids(rng, 5 + i), ids(rng, 1 + i)) for i in range(7)]


def pack(turns: list[Turn]) -> list[Batch]:
    return lay_out(group_turns(turns, LAYOUT), ROLES, LAYOUT)


def pack_separately(turns: list[Turn]) -> list[Batch]:
    return [batch for turn in turns for batch in pack([turn])]


def targets_of(batches: list[Batch], seed: int = 0) -> list[Targets]:
    """Draws targets and weights by node, so that they do not depend on the packing."""
    data = Minibatches([batches], WIDTH)
    assert data.width == WIDTH
    draws = [np.random.default_rng([seed, int(node)]) for node in data.actions.node_A]

    def field(shift: float, scale: float) -> list[np.ndarray]:
        x_AT = np.stack([shift + scale * rng.normal(size=WIDTH) for rng in draws])
        return data.by_row(np.where(data.mask(), x_AT, 0).astype(np.float32))

    # In the order of the fields: advantage, weight, old and reference log-probabilities, values.
    shapes = [(0, 1), (0.03, 0.01), (-5.7, 0.2), (-5.7, 0.2), (0, 1), (0, 1), (0.03, 0.01)]
    fields = [field(*shape) for shape in shapes]
    return [Targets(*of_one) for of_one in zip(*fields, strict=True)]


def total_gradient(model: SplitModel, batches: list[Batch], objective, targets=None) -> Gradient:
    """Returns the gradient summed over batches, with the sums of its metrics."""
    one, tenth = jax.device_put((np.float32(1.0), np.float32(0.1)))
    total = None
    for batch, target in zip(batches, targets or targets_of(batches), strict=True):
        rows, target = jax.device_put((batch.rows, target))
        part = gradient(model, rows, target, one, tenth, objective=objective)
        total = part if total is None else add(total, part)
    return jax.device_get(total)


def assert_close(actual: Gradient, expected: Gradient) -> None:
    """Asserts sums equal to 2e-6 of their size, and every gradient to 1e-5 of its norm."""
    for name, x in expected.sums.items():
        np.testing.assert_allclose(actual.sums[name], x, rtol=2e-6, atol=1e-6, err_msg=name)
    for a, b in zip(jax.tree.leaves(actual.grads), jax.tree.leaves(expected.grads), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-9
