"""The audit's arithmetic on a decision process of which all values are known."""

import numpy as np
import pytest

from jax_ragrl.bench.fidelity import moments_of, replay_of, with_intervals

DECISIONS, DRAWS, CONTINUATIONS, REPEATS = 400, 8, 24, 16


def decision(rng):
    """Actions with known values, a policy over them, and the returns that a reader would see.

    Two levels: an action leads to one of two states by chance, and that to a reward of 0 or 1.
    """
    policy_U = rng.dirichlet(np.ones(4))
    reached_U, low, high = rng.uniform(size=4), rng.uniform(0, 0.5), rng.uniform(0.5, 1)
    value_U = reached_U * high + (1 - reached_U) * low
    first, second = rng.choice(4, 2, replace=False)
    order = [first, second, *({*range(4)} - {first, second})]
    return policy_U[order], reached_U[order], (low, high), value_U[order]


def play(rng, reached_U, ends, shape):
    """Returns after each action, `[U, *shape]`; the same uniform numbers serve all actions."""
    state, reward = rng.uniform(size=(2, *shape))
    is_high = state < reached_U.reshape(-1, *(1 for _ in shape))
    return (reward < np.where(is_high, ends[1], ends[0])).astype(np.float64)


def audit(rule, *, is_return=False, seed=0):
    """The measures of a rule: from returns and the other returns of its group to credits."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(DECISIONS):
        policy_U, reached_U, ends, value_U = decision(rng)
        share_U = rng.multinomial(DRAWS, policy_U) / DRAWS
        replay = replay_of(play(rng, reached_U, ends, (CONTINUATIONS,)), share_U, DRAWS)
        own = np.stack([play(rng, reached_U, ends, (REPEATS, 2))[a] for a in (0, 1)])
        # Three more members of the group, of actions that the policy draws in the same state.
        others = rng.choice(4, 3, p=policy_U)
        rest = np.stack([play(rng, reached_U, ends, (REPEATS, 2))[u] for u in others])
        credit = rule(own, rest, value_U)
        rows.append(moments_of(credit, replay, is_return=is_return, tokens=40, actions=2))
    return with_intervals(rows)


def holds(interval, value):
    return interval[1] <= value <= interval[2]


def test_an_unbiased_rule_has_no_bias():
    found = audit(lambda own, rest, value_U: own - rest.mean(0))
    assert holds(found["agreement"], 1) and holds(found["scale"], 1), found
    assert found["bias"][0] < 0.06 and abs(found["offset"][0]) < 0.02
    assert 0.2 < found["correlation"][0] < 0.6 and found["tokens"][0] == 20
    assert found["worth"][0] == pytest.approx(50 * found["correlation"][0] ** 2)


def test_a_mean_that_holds_the_action_itself_is_a_smaller_scale_and_no_other_bias():
    found = audit(lambda own, rest, value_U: own - (own + rest.sum(0)) / 4)
    assert holds(found["scale"], 0.75) and not holds(found["scale"], 1)
    assert holds(found["agreement"], 1)


def test_a_baseline_that_depends_on_the_action_is_found():
    """The first action counts nine times in the mean, as if its role acted nine times."""

    def rule(own, rest, value_U):
        times = np.array([9.0, 1.0])[:, None, None]
        return own - (times * own + rest.sum(0)) / (times + 3)

    found = audit(rule)
    assert found["agreement"][2] < 0.95, found["agreement"]
    assert found["bias"][1] > 0.05


def test_a_return_is_compared_without_the_error_of_the_value():
    """Exact values in place of returns: the correlation is 1, though V is the mean of 8 actions."""
    found = audit(lambda own, rest, value_U: 0 * own + value_U[:2, None, None], is_return=True)
    assert found["correlation"][0] == pytest.approx(1, abs=0.03)
    assert found["noise"][0] == pytest.approx(0, abs=1e-12)
    assert found["agreement"][0] == pytest.approx(1, abs=0.02)


def test_luck_of_others_is_the_share_of_the_noise_in_which_the_two_draws_differ():
    def rule(own, rest, value_U):
        return 3 * own[..., :1] + own  # 9 and 16 parts of own luck are shared by both draws

    # Var = Var(4 x) in the first draw, Var(3 x + y) = 10 Var in the second; half the mean square
    # of x - y is one part of these.
    found = audit(rule)
    assert found["luck"][0] == pytest.approx(1 / 13, abs=0.015)


def test_an_action_that_is_not_trained_has_a_credit_of_zero():
    found = audit(lambda own, rest, value_U: np.where([[[True]], [[False]]], own, np.nan))
    assert found["trained"][0] == 0.5


def test_errors_are_those_of_means():
    """Over many replays the advantage scatters by its error, and its mean is the advantage."""
    rng = np.random.default_rng(3)
    policy_U, reached_U, ends, value_U = decision(rng)
    replays = []
    for _ in range(2000):
        share_U = rng.multinomial(DRAWS, policy_U) / DRAWS
        replays.append(replay_of(play(rng, reached_U, ends, (64,)), share_U, DRAWS))
    advantages = np.array([r.advantage_A for r in replays])
    expected = value_U[:2] - policy_U @ value_U
    assert advantages.mean(0) == pytest.approx(expected, abs=0.01)
    error_A = np.sqrt(np.mean([r.error_A**2 for r in replays], axis=0))
    assert error_A == pytest.approx(advantages.std(0), rel=0.1)
