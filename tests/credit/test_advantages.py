"""Rules of groups, whitening, and the coefficient of the KL penalty, by their equations."""

import math

import jax
import numpy as np
import pytest

from jax_ragrl.credit.advantages import (
    above_mean,
    best_of_group,
    group_centred,
    group_normalised,
    leave_one_out,
    whiten,
)
from jax_ragrl.credit.kl import adapt

RULES = [group_centred, group_normalised, leave_one_out, above_mean, best_of_group]


def centred(rewards, i):
    return rewards[i] - sum(rewards) / len(rewards)


def normalised(rewards, i):
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
    return (rewards[i] - mean) / (math.sqrt(variance) + 1e-6)


def without_own(rewards, i):
    rest = rewards[:i] + rewards[i + 1 :]
    return rewards[i] - sum(rest) / len(rest)


def positive(rewards, i):
    return max(centred(rewards, i), 0.0)


def best(rewards, i):
    return float(rewards[i] == max(rewards))


FORMULAS = (centred, normalised, without_own, positive, best)


@pytest.mark.parametrize(("rule", "formula"), list(zip(RULES, FORMULAS, strict=True)))
@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_the_group_rules_equal_their_equations(rule, formula, size):
    reward_K = np.random.default_rng(size).normal(size=size).astype(np.float32)
    expected = [formula(reward_K.astype(np.float64).tolist(), i) for i in range(size)]
    np.testing.assert_allclose(rule(reward_K), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rule(jax.device_put(reward_K)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 5.3, -2.7])
def test_equal_rewards_have_exactly_no_advantage(rule, reward):
    for size in (2, 3, 7, 8):
        assert not rule(np.full(size, reward, np.float32)).any()


def test_the_constants_of_the_divisors_have_effect():
    """1e-6 is added to the deviation, 1e-8 to the variance."""
    actual = group_normalised(np.float32([0.0, 1e-6]))
    np.testing.assert_allclose(actual[1], 0.5 / (2**-0.5 + 1), rtol=1e-4)
    x = np.float32([0.0, 2e-4])
    white = jax.device_get(whiten(*jax.device_put((x, np.ones(2, bool)))))
    np.testing.assert_allclose(white[1], 2**-0.5, rtol=1e-4)


def test_whitening_gives_mean_zero_and_deviation_one():
    x = np.array([[1.0, 2.0, np.nan], [4.0, np.inf, -3.0]], np.float32)
    mask = np.isfinite(x)
    actual = jax.device_get(whiten(*jax.device_put((x, mask))))
    values = x[mask].astype(np.float64)
    np.testing.assert_allclose(actual[mask], (values - values.mean()) / values.std(), rtol=1e-5)
    assert not actual[~mask].any()


@pytest.mark.parametrize("mask", [[True, True], [False, False], [True, False]])
def test_whitening_equal_values_gives_zero(mask):
    actual = whiten(*jax.device_put((np.array([0.7, 0.7], np.float32), np.array(mask))))
    np.testing.assert_allclose(actual, [0.0, 0.0], atol=1e-3)


@pytest.mark.parametrize(
    ("coefficient", "kl", "batch", "expected"),
    [
        # error: clip(kl / 6 - 1, -0.2, 0.2), then coefficient (1 + error batch / 10000)
        (0.2, 6.0, 128, 0.2),
        (0.2, 6.6, 100, 0.2002),
        (0.2, 5.4, 100, 0.1998),
        (0.2, 60.0, 500, 0.202),
        (0.2, 0.0, 500, 0.198),
        (0.2, -3.0, 500, 0.198),
        (0.2, math.inf, 500, 0.202),
        (0.2, math.nan, 500, 0.2),
        (0.0501, 0.0, 500, 0.05),  # the floor
        (0.01, 6.0, 500, 0.05),
    ],
)
def test_the_next_coefficient_equals_the_hand_computed_one(coefficient, kl, batch, expected):
    assert adapt(coefficient, kl, batch) == pytest.approx(expected, rel=1e-12)


def test_target_horizon_floor_and_ceiling_are_respected():
    assert adapt(1.0, 0.11, 10, target=0.1, horizon=100, floor=0.0) == pytest.approx(1.01)
    assert adapt(1.0, 0.0, 100, target=0.1, horizon=100, floor=0.9) == 0.9
    assert adapt(0.5, 12.0, 384, ceiling=0.2) == adapt(0.2, 12.0, 384, ceiling=0.2) == 0.2
