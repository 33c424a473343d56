"""Learning rates over a run, and optimizer steps against their equations."""

import jax
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.policies import Phase


def rates(at: list[int], **choices) -> list[float]:
    """Returns rates in a run of 5 rollouts with two epochs of two minibatches: 20 steps."""
    rate = Optimizer(9.0, epochs=2, minibatches=2, **choices).rate(0.2, 5)
    return [float(rate(step)) for step in at]


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("constant", 0.2, 0.2), ("linear", 0.15, 0.1), ("cosine", 0.15, 0.1)],
)
def test_the_rate_decays_to_its_final_fraction(schedule, middle, end):
    actual = rates([0, 10, 20], schedule=schedule, final_lr_fraction=0.5)
    np.testing.assert_allclose(actual, [0.2, middle, end], rtol=1e-5)


@pytest.mark.parametrize(("schedule", "end"), [("constant", 0.2), ("linear", 0.1), ("cosine", 0.1)])
def test_the_rate_warms_up_and_then_decays(schedule, end):
    actual = rates([0, 1, 4, 20], schedule=schedule, warmup_fraction=0.2, final_lr_fraction=0.5)
    np.testing.assert_allclose(actual, [0.0, 0.05, 0.2, end], rtol=1e-5)


def test_only_a_constant_rate_without_warmup_is_steady():
    assert Optimizer(0.1, schedule="constant").steady
    assert not Optimizer(0.1, schedule="constant", warmup_fraction=0.1).steady
    assert not Optimizer(0.1, schedule="linear").steady


def test_two_steps_equal_adamw_in_float64():
    """Loshchilov and Hutter 2019: the decay is a fraction of the weight, times the rate."""
    settings = Optimizer(
        0.1, schedule="constant", b1=0.5, b2=0.7, weight_decay=0.3, max_grad_norm=10.0
    )
    transform = settings.transform(0.1, 1)
    weight, gradients = np.array([2.0, -1.0]), (np.array([1.0, -2.0]), np.array([0.5, 3.0]))
    expected, m, v = weight, 0.0, 0.0
    params = jax.device_put(weight.astype(np.float32))
    state = transform.init(params)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.5 * m + 0.5 * g, 0.7 * v + 0.3 * g**2
        adam = (m / (1 - 0.5**t)) / (np.sqrt(v / (1 - 0.7**t)) + 1e-8)
        expected = expected - 0.1 * (adam + 0.3 * expected)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            change, state = transform.update(jax.device_put(g.astype(np.float32)), state, params)
        params = params + change
    np.testing.assert_allclose(params, expected, rtol=1e-5)


def test_only_the_first_moment_has_the_selected_dtype():
    state = (
        Optimizer(0.1, moment_dtype="bfloat16")
        .transform(0.1, 1)
        .init(jax.device_put(np.ones(2, np.float32)))
    )
    dtypes = [str(x.dtype) for x in jax.tree.leaves(state) if x.shape]
    assert dtypes == ["bfloat16", "float32"]


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), 1e39, -1.0])
def test_a_negative_or_non_finite_rate_is_refused(rate: float):
    with pytest.raises(UserError, match="optimizer.policy_lr is .*a finite number, 0 or more"):
        Optimizer(rate)
    with pytest.raises(UserError, match="optimizer.value_lr is"):
        Optimizer(0.1, rate)
    with pytest.raises(UserError, match="phases policy_lr is"):
        Phase(1, ("plan",), policy_lr=rate)
    Optimizer(0.0, 0.0)
