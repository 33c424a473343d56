import math

import jax
import numpy as np
import pytest

from jax_ragrl.losses import (
    clipped_policy_loss,
    dual_clipped_policy_loss,
    policy_gradient_loss,
    truncated_importance_weight,
)
from tests.losses.arrays import by_token, draws, put

# As in an update: ratios on both sides of every bound, advantages of both signs.
RATIOS = (0.1, 0.5, 0.75, 0.85, 1.0, 1.1, 1.25, 1.5, 2.5, 4.0, 9.0)
PAIRS = [(r, a) for r in RATIOS for a in (-2.0, -0.3, 0.0, 0.3, 2.0)]
CLIPS = [{}, {"eps_low": 0.1}, {"eps_high": 0.28}, {"eps_low": 0.3, "eps_high": 0.6}]


def clipped(logp, old, advantage, eps_low=0.2, eps_high=0.2):
    """Schulman et al. 2017, eq. 7."""
    ratio = math.exp(logp - old)
    inside = min(max(ratio, 1 - eps_low), 1 + eps_high)
    return -min(ratio * advantage, inside * advantage)


def dual_clipped(logp, old, advantage, dual_clip=3.0, **clips):
    """Ye et al. 2020, eq. 5."""
    gain = -clipped(logp, old, advantage, **clips)
    return -max(gain, dual_clip * advantage) if advantage < 0 else -gain


def pairs():
    ratio, advantage = np.array(PAIRS).T
    old = -1.5 + np.zeros_like(ratio)
    return np.log(ratio) + old, old, advantage, np.ones(len(ratio), bool)


@pytest.mark.parametrize(
    ("loss", "formula", "clips"),
    [
        *((clipped_policy_loss, clipped, clips) for clips in CLIPS),
        *((dual_clipped_policy_loss, dual_clipped, clips) for clips in CLIPS),
        *((dual_clipped_policy_loss, dual_clipped, {"dual_clip": x}) for x in (1.5, 100.0)),
    ],
)
def test_the_policy_losses_equal_their_equations(loss, formula, clips):
    *arrays, mask = pairs()
    expected = by_token(lambda *x: formula(*x, **clips), mask, *arrays)
    np.testing.assert_allclose(loss(*put(*arrays, mask), **clips), expected, rtol=1e-5)


def test_a_token_past_the_dual_bound_has_no_gradient():
    arrays = put(np.log([2.5, 4.0]), [0.0, 0.0], [-1.0, -1.0], [True, True])
    grad = jax.grad(lambda x: dual_clipped_policy_loss(x, *arrays[1:]).sum())(arrays[0])
    np.testing.assert_allclose(grad, [2.5, 0.0], rtol=1e-5)


def test_the_on_policy_gradient_is_minus_the_advantage():
    logp, advantage, mask = put([[-1.0, -2.0]], [[0.5, -3.0]], [[True, True]])
    losses = (
        lambda x: clipped_policy_loss(x, logp, advantage, mask).sum(),
        lambda x: dual_clipped_policy_loss(x, logp, advantage, mask).sum(),
        lambda x: policy_gradient_loss(x, advantage, mask).sum(),
    )
    for loss in losses:
        np.testing.assert_allclose(jax.grad(loss)(logp), [[-0.5, 3.0]])


def test_the_policy_gradient_loss_equals_its_equation():
    logp, advantage, mask = draws(0, 2)
    expected = by_token(lambda logp, advantage: -advantage * logp, mask, logp, advantage)
    actual = policy_gradient_loss(*put(logp, advantage, mask))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cap": 0.5}, {"cap": 1.5}])
def test_an_importance_weight_is_the_capped_ratio(options):
    behaviour, old, mask = draws(1, 2)
    cap = options.get("cap", 2.0)
    expected = by_token(lambda b, o: min(math.exp(o - b), cap), mask, behaviour, old)
    assert expected.max() == cap
    actual = truncated_importance_weight(*put(behaviour, old, mask), **options)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_an_importance_weight_has_no_gradient():
    behaviour, old, mask = put(*draws(1, 2))
    for at in (0, 1):
        grad = jax.grad(lambda *x: truncated_importance_weight(*x, mask).sum(), at)(behaviour, old)
        assert not np.any(grad)


@pytest.mark.parametrize("gap", [-300.0, 300.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_no_ratio_overflows(gap, advantage):
    old, at, mask = put([0.0], [advantage], [True])
    for loss in (clipped_policy_loss, dual_clipped_policy_loss):
        value, grad = jax.value_and_grad(lambda x, loss=loss: loss(x, old, at, mask).sum())(
            old + gap
        )
        assert np.isfinite(value) and np.isfinite(grad).all()
    assert np.isfinite(truncated_importance_weight(old, old + gap, mask)).all()
