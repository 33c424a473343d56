from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from jax_ragrl.credit.advantages import (
    above_mean,
    group_centred,
    group_normalised,
    leave_one_out,
    whiten,
)
from jax_ragrl.credit.returns import monte_carlo

RULES = [group_centred, group_normalised, leave_one_out, above_mean]


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


@pytest.mark.parametrize(
    ("rule", "formula"), list(zip(RULES, (centred, normalised, without_own, positive), strict=True))
)
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


@pytest.mark.parametrize("rule", RULES[:3])
def test_fractional_rewards_are_compared_unrounded(rule):
    actual = rule(np.float32([0.37, 0.36, 0.35]))
    expected = {group_centred: 0.01, group_normalised: 1.0, leave_one_out: 0.015}[rule]
    np.testing.assert_allclose(actual, [expected, 0.0, -expected], rtol=1e-3, atol=1e-5)


def test_the_constants_of_the_divisors_have_effect():
    """1e-6 is added to the deviation, 1e-8 to the variance."""
    actual = group_normalised(np.float32([0.0, 1e-6]))
    np.testing.assert_allclose(actual[1], 0.5 / (2**-0.5 + 1), rtol=1e-4)
    x = np.float32([0.0, 2e-4])
    white = jax.device_get(whiten(*jax.device_put((x, np.ones(2, bool)))))
    np.testing.assert_allclose(white[1], 2**-0.5, rtol=1e-4)


def test_monte_carlo_on_a_star_equals_centred_rewards():
    rewards = np.array([1.0, 0.25, 0.0, 0.7], np.float32)
    parent_N = np.array([-1, 0, 0, 0, 0], np.int32)
    tree = (parent_N, parent_N == 0, np.insert(rewards, 0, 0.0), np.ones(5, np.float32))
    value_N, _ = jax.device_get(monte_carlo(*jax.device_put(tree)))
    np.testing.assert_allclose(value_N[1:] - value_N[0], group_centred(rewards), atol=1e-6)


def test_normalised_groups_count_a_price_as_much_as_the_whole_answer():
    """Three rollouts pay for a search that adds `gain`, the fourth answers at once."""
    price = 0.057
    for gain in (0.0, 0.3, 1.0):
        reward = [gain - price] * 3 + [0.0]
        normalised = group_normalised(np.float32(reward))
        centred = group_centred(np.float32(reward))
        sign = 1 if gain > price else -1
        np.testing.assert_allclose(normalised, sign * np.array([0.5] * 3 + [-1.5]), rtol=1e-3)
        worth = (gain - price) / 4
        np.testing.assert_allclose(centred, [worth] * 3 + [-3 * worth], rtol=1e-5)


# --- Whitening -----------------------------------------------------------------------------------


def test_whitening_gives_mean_zero_and_deviation_one():
    x = np.array([[1.0, 2.0, np.nan], [4.0, np.inf, -3.0]], np.float32)
    mask = np.isfinite(x)
    actual = jax.device_get(whiten(*jax.device_put((x, mask))))
    values = x[mask].astype(np.float64)
    np.testing.assert_allclose(actual[mask], (values - values.mean()) / values.std(), rtol=1e-5)
    assert not actual[~mask].any()


def test_whitening_ignores_padding():
    x, mask = np.float32([[0.5, 2.0], [-1.0, 3.0]]), np.ones((2, 2), bool)
    plain = jax.device_get(whiten(*jax.device_put((x, mask))))
    wide = np.pad(x, 2, constant_values=7.0), np.pad(mask, 2)
    padded = jax.device_get(whiten(*jax.device_put(wide)))
    np.testing.assert_allclose(padded[2:4, 2:4], plain, rtol=1e-5)
    assert np.count_nonzero(padded) == 4


@pytest.mark.parametrize("mask", [[True, True], [False, False], [True, False]])
def test_whitening_equal_values_gives_zero(mask):
    actual = whiten(*jax.device_put((np.array([0.7, 0.7], np.float32), np.array(mask))))
    np.testing.assert_allclose(actual, [0.0, 0.0], atol=1e-3)
