"""Credit rules on whole forests."""

import itertools

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import (
    child_mean,
    compare,
    immediate_credit,
    over_roles,
    over_rollouts,
    over_siblings,
    pad_rows,
    reachable_leaves,
    shared_credit,
)
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Action, Record, build_forest
from jax_ragrl.types import Question

QUESTIONS = (Question("a", "a?", ("x",)), Question("b", "b?", ("y",)))


def node(parent, path, role="role", **more):
    action = None if role == LEAF else Action((), (1,), "x")
    return Record(parent, 0, role, 1, path, action=action, **more)


def chains(*lengths: int, question: int = 0):
    """Returns records of unbranched rollouts: `lengths` actions each, then a leaf."""
    records: list[Record] = []
    for length in lengths:
        for i in range(length):
            parent = NO_PARENT if i == 0 else len(records) - 1
            records.append(Record(parent, question, "role", 1, ()))
        records.append(Record(len(records) - 1, question, LEAF, 1, (), answer="x"))
    return records


def forest_of(records, rewards, own_rewards=()):
    forest = build_forest(QUESTIONS, records)
    reward_N = np.zeros(len(records), np.float32)
    reward_N[forest.leaf_N] = rewards
    for node, value in own_rewards:
        reward_N[node] = value
    return forest, reward_N


def test_immediate_credit_adds_the_mean_of_leaf_children():
    """The second action gets the mean of its two leaves; actions keep their own rewards."""
    leaves = [Record(1, 0, LEAF, 1, (), answer="y"), Record(NO_PARENT, 1, LEAF, 1, (), answer="y")]
    forest, reward_N = forest_of([*chains(2), *leaves], [0.4, 0.8, 0.8], [(0, -0.5)])
    credit_N = immediate_credit(forest, reward_N)[0]
    np.testing.assert_allclose(credit_N, [-0.5, 0.6, 0, 0, 0], atol=1e-7)


# Three groups, the second of one member; the last two members are in none.
GROUP = np.array([0, 2, 1, 0, 2, 2, 0, 2, -1, -1])
REWARD = np.array([1 / 3, 0.25, 0.7, -1.2, 0.25, 0.25, 2.5, 0.4, np.nan, np.inf], np.float32)


@pytest.mark.parametrize("rule", [group_centred, group_normalised, leave_one_out])
def test_each_group_is_compared_alone(rule):
    """A member that is alone, or in no group, has advantage 0; the order changes nothing."""
    actual = compare(rule, REWARD, GROUP)
    for number in (0, 2):
        np.testing.assert_array_equal(actual[number == GROUP], rule(REWARD[number == GROUP]))
    assert not actual[[2, 8, 9]].any()
    order, names = np.random.default_rng(0).permutation(10), np.array([2, 0, 1, -1])
    shuffled = compare(rule, REWARD[order], names[GROUP[order]])
    np.testing.assert_allclose(shuffled, actual[order], rtol=1e-5, atol=1e-6)


OWN = [(0, -1.0), (1, -0.3), (3, -0.1)]


def test_ablation_credits_count_the_actions_own_rewards():
    """Both rollouts have equal answers; the first has actions that cost 1 and 0.3, the second one
    that costs 0.1.
    """
    forest, reward_N = forest_of(chains(2, 1), [1.0, 1.0], OWN)
    np.testing.assert_allclose(shared_credit(forest, reward_N)[0], [0, 0.7, 1, 0.9, 1], atol=1e-6)
    return_N, leaves_N = reachable_leaves(forest, reward_N)
    np.testing.assert_allclose(return_N, [-0.3, 0.7, 1, 0.9, 1], atol=1e-6)
    assert leaves_N.all()
    advantage_N, weight_N = over_rollouts(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N, [-0.6] * 3 + [0.6] * 2, atol=1e-6)
    assert weight_N.all()


def test_actions_without_a_leaf_enter_no_statistics():
    """One action without a leaf is in the first rollout, another one is a rollout without a leaf.

    Their rewards enter no statistics, and neither is trained.
    """
    records = [*chains(1, 1), Record(0, 0, "role", 1, ()), Record(NO_PARENT, 0, "role", 1, ())]
    forest, reward_N = forest_of(records, [1.0, 0.0], [(4, 5.0), (5, 7.0)])
    advantage_N, weight_N = over_rollouts(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N[:4], [0.5, 0.5, -0.5, -0.5])
    assert weight_N.tolist() == [1, 1, 1, 1, 0, 0]


def test_each_action_counts_in_the_mean_of_its_role_and_question():
    """The role acts three times in a rollout of reward 1, and once in one of reward 0."""
    forest, reward_N = forest_of(chains(3, 1), [1.0, 0.0])
    advantage_N, _ = over_roles(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N[[0, 1, 2, 4]], [0.25, 0.25, 0.25, -0.75], atol=1e-6)
    # Two questions with two rollouts of two roles: each role has its own mean per question.
    records = chains(2, 2)
    other = [r for r in chains(2, 2, question=1)]
    for r in other:
        r.parent += len(records) if r.parent != NO_PARENT else 0
    records += other
    for node, role in enumerate(["first", "second", LEAF] * 4):
        records[node].role = role
    forest, reward_N = forest_of(records, [1.0, 0.0, 0.5, 0.1], [(1, -0.5), (6, -0.2)])
    advantage_N, _ = over_roles(forest, reward_N, group_centred)
    acts = [0, 1, 3, 4, 6, 7, 9, 10]
    expected = [0.5, 0.25, -0.5, -0.25, 0.1, 0.2, -0.1, -0.2]
    np.testing.assert_allclose(advantage_N[acts], expected, atol=1e-6)


def test_siblings_are_compared_by_the_rewards_of_their_leaves():
    """Three siblings: one with two leaves (0.5), one with one leaf (1.0), one without a leaf.

    The first has two children tried in one state (1 and 0).
    """
    records = [
        *(node(NO_PARENT, (i,)) for i in range(3)),
        *(node(0, (0, i)) for i in range(2)),
        *(node(parent, (0, 9), LEAF, answer="x") for parent in (3, 4, 1)),
    ]
    forest, reward_N = forest_of(records, [1.0, 0.0, 1.0])
    advantage_N, weight_N = over_siblings(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N[:5], [-0.25, 0.25, 0.0, 0.5, -0.5])
    np.testing.assert_array_equal(weight_N, [1, 1, 0, 1, 1, 0, 0, 0])
    # An action without siblings has weight zero.
    records = chains(2)
    for record in records[:2]:
        record.action = Action((), (1,), "x")
    forest, reward_N = forest_of(records, [1.0])
    assert not over_siblings(forest, reward_N, group_centred)[1].any()


def test_merged_siblings_count_as_often_as_they_were_sampled():
    """The first of two siblings has a child that was sampled three times, with reward 1, and one
    with reward 0."""
    records = [
        *(node(NO_PARENT, (i,)) for i in range(2)),
        *(node(0, (0, i), multiplicity=3 - 2 * i) for i in range(2)),
        *(node(parent, (0, 9), LEAF, answer="x") for parent in (2, 3, 1)),
    ]
    forest, reward_N = forest_of(records, [1.0, 0.0, 0.0])
    credit_N, _ = over_siblings(forest, reward_N, group_centred)
    np.testing.assert_allclose(credit_N, [0.375, -0.375, 3 * 0.25, -0.75, 0, 0, 0])
    # As GRPO's four samples, three of one text.
    credit_N, _ = over_siblings(forest, reward_N, group_normalised)
    expected_X = group_normalised(np.array([1.0, 1.0, 1.0, 0.0]))
    np.testing.assert_allclose(credit_N[2:4] / [3, 1], expected_X[2:], rtol=1e-5)


@pytest.mark.parametrize("forced", [(), (0,), (1, 2)])
@pytest.mark.parametrize("samples", [2, 4])
def test_the_expected_credit_times_score_of_all_draws_is_the_policy_gradient(samples, forced):
    """Three actions with known values in one state: their draws, with actions that are forced.

    Forced actions that the policy did not sample are not trained (`train_forced=False`).
    """
    policy_A, value_A = np.array([0.5, 0.3, 0.2]), np.array([1.0, 0.25, -0.5])
    score_AA = np.eye(3) - policy_A  # of each action, by the logits
    mean_A, taught = np.zeros(3), set()
    for draws in itertools.product(range(3), repeat=samples):
        tried = dict.fromkeys((*forced, *draws))  # forced ones first, as an expander does
        records = [
            node(NO_PARENT, (i,), is_forced=a in forced, multiplicity=(*forced, *draws).count(a))
            for i, a in enumerate(tried)
        ]
        records += [node(i, (i, 0), LEAF, answer="x") for i in range(len(tried))]
        forest, reward_N = forest_of(records, value_A[list(tried)])
        credit_N, _ = over_siblings(forest, reward_N, leave_one_out)
        assert len(tried) > 1 or not credit_N.any()  # draws that agree teach nothing
        for i, a in enumerate(tried):
            if a in draws:
                mean_A += policy_A[list(draws)].prod() * float(credit_N[i]) * score_AA[a]
                taught.add(a)
    assert taught == {0, 1, 2}
    np.testing.assert_allclose(mean_A / samples, (policy_A * value_A) @ score_AA, atol=1e-7)


def test_a_forced_action_is_trained_once_unless_it_is_sampled():
    records = [
        *(node(NO_PARENT, (i,), is_forced=i < 2, multiplicity=(1, 3, 1)[i]) for i in range(3)),
        *(node(i, (i, 0), LEAF, answer="x") for i in range(3)),
    ]
    credit_N, weight_N = over_siblings(*forest_of(records, [1.0, 0.0, 0.5]), group_centred)
    np.testing.assert_allclose(credit_N, [1 - 0.3, 2 * (0 - 0.3), 0.5 - 0.3, 0, 0, 0], atol=1e-6)
    assert weight_N.tolist() == [1, 1, 1, 0, 0, 0]


def test_the_mean_over_children_counts_samples_costs_and_dead_branches():
    records = [
        Record(NO_PARENT, 0, "role", 1, (0,)),
        Record(0, 0, "role", 2, (0, 0), multiplicity=3),
        Record(1, 0, LEAF, 3, (0, 0), answer="x"),
        Record(1, 0, LEAF, 3, (0, 0), answer="x"),
        Record(0, 0, LEAF, 2, (0, 1), finish_reason="Invalid Format"),
        Record(NO_PARENT, 0, "role", 1, (1,)),
    ]
    forest, reward_N = forest_of(records, [1.0, 0.0, 0.0], [(1, -0.25), (5, np.nan)])
    value_N, weight_N = child_mean(forest, reward_N)
    np.testing.assert_allclose(value_N, [0.25 * 3 / 4, 0.25, 1, 0, 0, 0])
    assert weight_N.tolist() == [1, 1, 1, 1, 1, 0]


def test_the_mean_over_children_is_of_the_samples_of_the_policy():
    """After the root a forced action (reward 4), one forced and sampled twice (1), a sample (7).

    Below the last one only a forced action has a leaf, beside a sample without one.
    """
    records = [
        node(NO_PARENT, (0,)),
        node(0, (0, 0), is_forced=True),
        node(0, (0, 1), is_forced=True, multiplicity=3),
        node(0, (0, 2)),
        node(3, (0, 2, 0), is_forced=True),
        node(3, (0, 2, 1)),
        *(node(parent, (0, 9), LEAF, answer="x") for parent in (1, 2, 4)),
    ]
    value_N, _ = child_mean(*forest_of(records, [4.0, 1.0, 7.0]))
    np.testing.assert_allclose(value_N, [(2 * 1 + 7) / 3, 4, 1, 7, 7, 0, 4, 1, 7], rtol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        *(shared_credit, immediate_credit, reachable_leaves, child_mean),
        *(over_rollouts, over_roles, over_siblings),
    ],
)
def test_an_empty_forest_has_empty_credit(rule):
    more = (group_centred,) if rule in (over_rollouts, over_roles, over_siblings) else ()
    for x_N in rule(*forest_of([], []), *more):
        assert x_N.shape == (0,) and x_N.dtype == np.float32


def test_padding_gives_a_positive_multiple():
    """An empty array is padded to one block, since no shape may be empty."""
    assert pad_rows(np.zeros((0, 3)), 4, -1).shape == (4, 3)
    np.testing.assert_array_equal(pad_rows(np.ones(4), 4), np.ones(4))
    np.testing.assert_array_equal(
        pad_rows(np.ones(5, np.int32), 4, -1), [1, 1, 1, 1, 1, -1, -1, -1]
    )


def test_branching_rollouts_are_refused_by_credits_of_whole_rollouts():
    forest, reward_N = forest_of([*chains(1), Record(0, 0, LEAF, 1, (), answer="y")], [1.0, 1.0])
    with pytest.raises(UserError, match="siblings"):
        over_rollouts(forest, reward_N, group_centred)
    with pytest.raises(UserError, match="credit=reachable_leaves"):
        shared_credit(forest, reward_N)
