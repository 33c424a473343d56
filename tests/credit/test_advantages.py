from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest

from jax_ragrl.credit.advantages import (
    group_centred,
    group_normalised,
    leave_one_out,
    tree_group,
    whiten,
)
from jax_ragrl.credit.returns import monte_carlo

RULES = [group_centred, group_normalised, leave_one_out]

# Three questions; the second has one counted node; the last two nodes are padding.
GROUP = [0, 0, 1, 0, 2, 2, 1, 2, 0, 2, -1, -1]
COUNTED = [True, False, True, True, True, True, False, False, True, True, True, False]
REWARD = [1 / 3, 1 / 3, 0.7, -1.2, 0.25, 0.25, 0.9, 2.5, 0.4, 0.25, math.nan, math.inf]


def advantages(rule, reward, group, counted, num_groups=3) -> np.ndarray:
    arrays = (np.array(reward, np.float32), np.array(group, np.int32), np.array(counted, bool))
    return jax.device_get(_jitted(rule)(*jax.device_put(arrays), num_groups))


@functools.cache
def _jitted(rule):
    return jax.jit(rule, static_argnums=3)


def centred(others, own):
    return own - sum(others) / len(others)


def normalised(others, own):
    mean = sum(others) / len(others)
    variance = sum((r - mean) ** 2 for r in others) / (len(others) - 1)
    return (own - mean) / (math.sqrt(variance) + 1e-6)


def without_own(others, own):
    rest = list(others)
    rest.remove(own)
    return own - sum(rest) / len(rest)


def reference(formula, reward, group, counted):
    """Applies `formula` to the counted rewards of each node's group and the node's own reward.

    Groups of one are 0.
    """
    out = []
    for own, g in zip(reward, group, strict=True):
        others = [r for r, h, c in zip(reward, group, counted, strict=True) if c and h == g]
        out.append(formula(others, own) if g >= 0 and len(others) > 1 else 0.0)
    return out


@pytest.mark.parametrize(
    ("rule", "formula"), [(group_centred, centred), (group_normalised, normalised)]
)
def test_the_group_advantages_equal_their_equations(rule, formula):
    reward = [*REWARD[:4], 0.5, -0.5, *REWARD[6:]]
    actual = advantages(rule, reward, GROUP, COUNTED)
    expected = reference(formula, reward, GROUP, COUNTED)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_leave_one_out_equals_its_equation():
    actual = advantages(leave_one_out, REWARD, GROUP, COUNTED)
    counted = np.array(COUNTED) & (np.array(GROUP) >= 0)
    reward, group = ([x[i] for i in np.flatnonzero(counted)] for x in (REWARD, GROUP))
    expected = reference(without_own, reward, group, [True] * len(reward))
    np.testing.assert_allclose(actual[counted], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_an_uncounted_node_gets_the_advantage_of_its_reward(rule):
    actual = advantages(rule, REWARD, GROUP, COUNTED)
    assert not COUNTED[1] and REWARD[0] == REWARD[1] and actual[0] == actual[1] != 0


@pytest.mark.parametrize("rule", RULES)
def test_a_group_of_one_has_advantage_zero(rule):
    actual = advantages(rule, REWARD, GROUP, COUNTED)
    assert not actual[[2, 6]].any()  # also for the uncounted node with another reward


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 5.3, -2.7])
def test_equal_rewards_have_exactly_no_advantage(rule, reward):
    for size in (2, 3, 7, 8):
        actual = advantages(rule, [reward] * size, [0] * size, [True] * size)
        assert not actual.any()


@pytest.mark.parametrize("rule", RULES)
def test_nodes_without_a_group_have_no_effect(rule):
    actual = advantages(rule, REWARD, GROUP, COUNTED)
    assert not actual[10:].any()
    alone = advantages(rule, REWARD[:10], GROUP[:10], COUNTED[:10])
    np.testing.assert_array_equal(actual[:10], alone)
    beyond = advantages(rule, REWARD, [*GROUP[:10], 3, 99], COUNTED)
    np.testing.assert_array_equal(actual, beyond)


@pytest.mark.parametrize("rule", RULES)
def test_more_executors_change_no_advantage(rule):
    before = advantages(rule, REWARD, GROUP, COUNTED)
    copies = [1, 1, 6, 7]
    longer = [[*x, *(x[i] for i in copies)] for x in (REWARD, GROUP, COUNTED)]
    after = advantages(rule, *longer)
    np.testing.assert_array_equal(after[:12], before)
    np.testing.assert_array_equal(after[12:], before[copies])


@pytest.mark.parametrize("rule", RULES)
def test_permuting_questions_permutes_advantages(rule):
    before = advantages(rule, REWARD, GROUP, COUNTED)
    order = np.random.default_rng(0).permutation(len(GROUP))
    name = np.array([2, 0, 1, -1])  # the last number is for padding
    shuffled = advantages(
        rule, np.array(REWARD)[order], name[np.array(GROUP)][order], np.array(COUNTED)[order]
    )
    np.testing.assert_allclose(shuffled, before[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_fractional_rewards_are_compared_unrounded(rule):
    actual = advantages(rule, [0.37, 0.36, 0.35], [0] * 3, [True] * 3)
    expected = {group_centred: 0.01, group_normalised: 1.0, leave_one_out: 0.015}[rule]
    np.testing.assert_allclose(actual, [expected, 0.0, -expected], rtol=1e-3, atol=1e-5)


def test_the_constants_of_the_divisors_have_effect():
    """1e-6 is added to the deviation, 1e-8 to the variance."""
    actual = advantages(group_normalised, [0.0, 1e-6], [0] * 2, [True] * 2)
    np.testing.assert_allclose(actual[1], 0.5 / (2**-0.5 + 1), rtol=1e-4)
    x = np.float32([0.0, 2e-4])
    white = jax.device_get(whiten(*jax.device_put((x, np.ones(2, bool)))))
    np.testing.assert_allclose(white[1], 2**-0.5, rtol=1e-4)


def test_monte_carlo_on_a_star_equals_centred_rewards():
    rewards = np.array([1.0, 0.25, 0.0, 0.7], np.float32)
    parent_N = np.array([-1, 0, 0, 0, 0], np.int32)
    tree = (parent_N, parent_N == 0, np.insert(rewards, 0, 0.0), np.ones(5, np.float32))
    value_N, _ = jax.device_get(monte_carlo(*jax.device_put(tree)))
    actual = advantages(group_centred, rewards, [0] * 4, [True] * 4)
    np.testing.assert_allclose(value_N[1:] - value_N[0], actual, atol=1e-6)


# --- Trees ---------------------------------------------------------------------------------------


def test_the_tree_advantage_is_the_mean_of_question_and_tree():
    # One question; trees 0 (leaves 1, 2, 3) and 4 (leaves 5, 6); a question of one tree, 7.
    tree = np.int32([0, 0, 0, 0, 4, 4, 4, 7, 7, 7])
    reward = [0.0, 1.0, 0.2, 0.2, 0.0, 0.5, 0.0, 0.0, 0.3, 0.9]
    leaf = [r not in (0, 4, 7) for r in range(10)]
    question = [0] * 7 + [1] * 3
    arrays = (np.float32(reward), np.int32(question), tree, np.array(leaf))
    actual = jax.device_get(tree_group(*jax.device_put(arrays), 2, 10))
    among = reference(normalised, reward, question, leaf)
    within = reference(normalised, reward, tree.tolist(), leaf)
    expected = [(a + b) / 2 for a, b in zip(among, within, strict=True)]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual[8:], within[8:], rtol=1e-5)  # one tree: both levels agree


def test_chains_have_half_the_advantage_of_their_question():
    reward, counted = np.float32([1.0, 0.0, 0.5]), np.ones(3, bool)
    arrays = jax.device_put((reward, np.zeros(3, np.int32), np.arange(3, dtype=np.int32), counted))
    actual = tree_group(*arrays, 1, 3)
    plain = advantages(group_normalised, reward, [0] * 3, counted)
    np.testing.assert_allclose(actual, plain / 2, rtol=1e-6)


def test_normalised_groups_count_a_price_as_much_as_the_whole_answer():
    """Three rollouts pay for a search that adds `gain`, the fourth answers at once."""
    price = 0.057
    for gain in (0.0, 0.3, 1.0):
        reward = [gain - price] * 3 + [0.0]
        normalised = advantages(group_normalised, reward, [0] * 4, [True] * 4, 1)
        centred = advantages(group_centred, reward, [0] * 4, [True] * 4, 1)
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
