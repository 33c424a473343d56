"""The rate of every step of a run, and a step of the optimizer, by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.policies import Phase


def rates(at: list[int], **choices) -> list[float]:
    """Of a run of 5 rollouts, each two epochs of two minibatches: 20 steps, the peak 0.2."""
    rate = Optimizer(9.0, epochs=2, minibatches=2, **choices).rate(0.2, 5)
    return [float(rate(step)) for step in at]


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("constant", 0.2, 0.2), ("linear", 0.15, 0.1), ("cosine", 0.15, 0.1)],
)
def test_a_rate_falls_to_its_share_at_the_last_step_of_the_run(schedule, middle, end):
    found = rates([0, 10, 20], schedule=schedule, final=0.5)
    np.testing.assert_allclose(found, [0.2, middle, end], rtol=1e-5)


@pytest.mark.parametrize(("schedule", "end"), [("constant", 0.2), ("linear", 0.1), ("cosine", 0.1)])
def test_a_rate_rises_from_nothing_over_its_share_of_the_steps_and_then_falls(schedule, end):
    found = rates([0, 1, 4, 20], schedule=schedule, warmup=0.2, final=0.5)
    np.testing.assert_allclose(found, [0.0, 0.05, 0.2, end], rtol=1e-5)


def test_a_rate_is_steady_where_it_is_one_number_for_a_run_of_any_length():
    assert Optimizer(0.1, schedule="constant").steady
    assert not Optimizer(0.1, schedule="constant", warmup=0.1).steady
    assert not Optimizer(0.1, schedule="linear").steady


def test_a_step_is_adams_with_the_moments_and_the_decay_that_are_named():
    """Loshchilov and Hutter 2019: the decay is a share of the weight, at the rate. Two steps."""
    chosen = Optimizer(
        0.1, schedule="constant", b1=0.5, b2=0.7, weight_decay=0.3, max_grad_norm=10.0
    )
    transform = chosen.transform(0.1, 1)
    weight, gradients = np.array([2.0, -1.0]), (np.array([1.0, -2.0]), np.array([0.5, 3.0]))
    expected, m, v = weight, 0.0, 0.0
    found = jax.device_put(weight.astype(np.float32))
    state = transform.init(found)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.5 * m + 0.5 * g, 0.7 * v + 0.3 * g**2
        adam = (m / (1 - 0.5**t)) / (np.sqrt(v / (1 - 0.7**t)) + 1e-8)
        expected = expected - 0.1 * (adam + 0.3 * expected)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            moved, state = transform.update(jax.device_put(g.astype(np.float32)), state, found)
        found = found + moved
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_first_moment_has_the_dtype_that_is_named_and_the_second_is_float32():
    state = (
        Optimizer(0.1, moments="bfloat16")
        .transform(0.1, 1)
        .init(jax.device_put(np.ones(2, np.float32)))
    )
    dtypes = [str(x.dtype) for x in jax.tree.leaves(state) if x.shape]
    assert dtypes == ["bfloat16", "float32"]


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), 1e39, -1.0])
def test_a_rate_that_is_negative_or_not_a_finite_float32_is_refused(rate: float):
    with pytest.raises(UserError, match="optimizer.policy_lr is .*a finite number, 0 or more"):
        Optimizer(rate)
    with pytest.raises(UserError, match="optimizer.value_lr is"):
        Optimizer(0.1, rate)
    with pytest.raises(UserError, match="phases policy_lr is"):
        Phase(1, ("plan",), policy_lr=rate)
    Optimizer(0.0, 0.0)
