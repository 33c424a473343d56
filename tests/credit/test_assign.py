"""Credit rules on whole forests."""

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import (
    earned,
    over_roles,
    over_rollouts,
    over_siblings,
    padded,
    reachable_leaves,
    shared,
)
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Action, Record, plant
from jax_ragrl.types import Question

QUESTIONS = (Question("a", "a?", ("x",)), Question("b", "b?", ("y",)))


def chains(*lengths: int, question: int = 0):
    """Records of rollouts that do not branch: so many actions each, then a leaf."""
    records: list[Record] = []
    for length in lengths:
        for i in range(length):
            parent = NO_PARENT if i == 0 else len(records) - 1
            records.append(Record(parent, question, "role", 1, ()))
        records.append(Record(len(records) - 1, question, LEAF, 1, (), answer="x"))
    return records


def rewarded(records, rewards, own_rewards=()):
    forest = plant(QUESTIONS, records)
    reward_N = np.zeros(len(records), np.float32)
    reward_N[forest.leaf_N] = rewards
    for node, value in own_rewards:
        reward_N[node] = value
    return forest, reward_N


def test_a_shared_reward_reaches_every_action_with_its_own_term_added():
    forest, reward_N = rewarded(chains(2, 1), [0.3, 0.7], [(1, -0.5)])
    credit_N, weight_N = shared(forest, reward_N)
    np.testing.assert_allclose(credit_N, [0.3, -0.2, 0.3, 0.7, 0.7])
    assert (weight_N > 0).all()


def test_a_leafs_reward_is_earned_by_the_action_right_before_it():
    """Two leaves after the second action earn it their mean; actions keep their own terms."""
    records = chains(2)
    records.append(Record(1, 0, LEAF, 1, (), answer="y"))
    forest, reward_N = rewarded(records, [0.4, 0.8], [(0, -0.5)])
    np.testing.assert_allclose(earned(forest, reward_N)[0], [-0.5, 0.6, 0, 0], atol=1e-7)


def test_the_first_action_of_a_batch_earns_its_leaf_and_a_leaf_alone_is_nobodys():
    records = [*chains(1), Record(NO_PARENT, 1, LEAF, 1, (), answer="y")]
    forest, reward_N = rewarded(records, [0.4, 0.8])
    np.testing.assert_allclose(earned(forest, reward_N)[0], [0.4, 0, 0], atol=1e-7)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (group_centred, [-1.0, 1.0]),
        (group_normalised, [-(2**-0.5), 2**-0.5]),  # unbiased: the deviation of 1, 3 is sqrt 2
        (leave_one_out, [-2.0, 2.0]),
    ],
)
def test_rollouts_are_compared_within_their_question(rule, expected):
    records = chains(1, 1)
    forest, reward_N = rewarded(records, [1.0, 3.0])
    advantage_N, _ = over_rollouts(forest, reward_N, rule)
    np.testing.assert_allclose(advantage_N[[0, 2]], expected, rtol=1e-5)


OWN = [(0, -1.0), (1, -0.3), (3, -0.1)]


def test_a_crossed_credit_counts_what_actions_earn_themselves():
    """Two rollouts with equal answers: the first has two actions that cost 1 and 0.3, the second
    one that costs 0.1."""
    forest, reward_N = rewarded(chains(2, 1), [1.0, 1.0], OWN)
    np.testing.assert_allclose(shared(forest, reward_N)[0], [0, 0.7, 1, 0.9, 1], atol=1e-6)
    return_N, leaves_N = reachable_leaves(forest, reward_N)
    np.testing.assert_allclose(return_N, [-0.3, 0.7, 1, 0.9, 1], atol=1e-6)
    assert leaves_N.all()
    advantage_N, weight_N = over_rollouts(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N, [-0.6] * 3 + [0.6] * 2, atol=1e-6)
    assert weight_N.all()


def test_siblings_with_equal_answers_are_compared_by_what_they_and_their_paths_cost():
    records = chains(2, 1)
    for i, node in enumerate((0, 3)):
        records[node].path, records[node].action = (i,), Action((), (i,), "x")
    advantage_N, weight_N = over_siblings(*rewarded(records, [1.0, 1.0], OWN), group_centred)
    np.testing.assert_allclose(advantage_N[[0, 3]], [-0.6, 0.6], atol=1e-6)
    assert weight_N.tolist() == [1, 0, 0, 1, 0]


def test_what_was_not_carried_out_is_no_part_of_a_rollout():
    """A sibling without a leaf in the first rollout, and one in place of a rollout: their rewards
    enter no statistics, and neither is trained."""
    records = [*chains(1, 1), Record(0, 0, "role", 1, ()), Record(NO_PARENT, 0, "role", 1, ())]
    forest, reward_N = rewarded(records, [1.0, 0.0], [(4, 5.0), (5, 7.0)])
    advantage_N, weight_N = over_rollouts(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N[:4], [0.5, 0.5, -0.5, -0.5])
    assert weight_N.tolist() == [1, 1, 1, 1, 0, 0]


def test_more_actions_in_a_rollout_change_nobodys_advantage():
    few = over_rollouts(*rewarded(chains(1, 1, 1), [1.0, 2.0, 6.0]), group_normalised)[0]
    many = over_rollouts(*rewarded(chains(1, 7, 1), [1.0, 2.0, 6.0]), group_normalised)[0]
    np.testing.assert_array_equal(few[[0, 2, 4]], many[[0, 2, 10]])
    assert len(set(many[1:9].tolist()) - {many[2]}) == 1  # all of a rollout alike


def test_a_role_is_compared_with_itself_in_the_other_rollouts():
    """Two roles in two rollouts of a question: the second action of the first one pays 0.5."""
    records = chains(2, 2)
    for node, role in enumerate(["first", "second", LEAF] * 2):
        records[node].role = role
    forest, reward_N = rewarded(records, [1.0, 0.0], [(1, -0.5)])
    advantage_N, weight_N = over_roles(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N[[0, 1, 3, 4]], [0.5, 0.25, -0.5, -0.25], atol=1e-6)
    assert weight_N.all() and advantage_N.dtype == np.float32


def test_roles_of_different_questions_are_not_compared():
    """Two questions, two rollouts each of two roles: in each, its own mean, for each role."""
    records = chains(2, 2)
    other = [r for r in chains(2, 2, question=1)]
    for r in other:
        r.parent += len(records) if r.parent != NO_PARENT else 0
    records += other
    for node, role in enumerate(["first", "second", LEAF] * 4):
        records[node].role = role
    forest, reward_N = rewarded(records, [1.0, 0.0, 0.5, 0.1], [(1, -0.5), (6, -0.2)])
    advantage_N, _ = over_roles(forest, reward_N, group_centred)
    acts = [0, 1, 3, 4, 6, 7, 9, 10]
    expected = [0.5, 0.25, -0.5, -0.25, 0.1, 0.2, -0.1, -0.2]
    np.testing.assert_allclose(advantage_N[acts], expected, atol=1e-6)


def test_a_question_with_one_rollout_teaches_nothing():
    other = [
        Record(r.parent if r.parent < 0 else r.parent + 2, 1, r.role, 1, (), answer=r.answer)
        for r in chains(1, 1)
    ]
    forest, reward_N = rewarded(chains(1) + other, [5.0, 0.0, 1.0])
    advantage_N, _ = over_rollouts(forest, reward_N, group_normalised)
    assert advantage_N[0] == 0.0 and advantage_N[2] < 0 < advantage_N[4]


def test_siblings_are_compared_by_what_their_leaves_earned():
    """A decision of three: one of two leaves (0.5), one of one (1.0), one whose line has no end.

    Below the first stand two that were tried in one state (1 and 0), and a line has no siblings.
    """

    def node(parent, path, role="role", **more):
        action = None if role == LEAF else Action((), (1,), "x")
        return Record(parent, 0, role, 1, path, action=action, **more)

    leaf = {"role": LEAF, "answer": "x"}
    records = [
        *(node(NO_PARENT, (i,)) for i in range(3)),
        *(node(0, (0, i)) for i in range(2)),
        *(node(parent, (0, 9), **leaf) for parent in (3, 4, 1)),
    ]
    forest, reward_N = rewarded(records, [1.0, 0.0, 1.0])
    advantage_N, weight_N = over_siblings(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N[:5], [-0.25, 0.25, 0.0, 0.5, -0.5])
    np.testing.assert_array_equal(weight_N, [1, 1, 0, 1, 1, 0, 0, 0])


def test_siblings_are_compared_by_leaves_of_which_a_merged_one_counts_once():
    """Below the first of two lies a merged action that earned 1 beside one that earned 0."""

    def node(parent, path, role="role", **more):
        action = None if role == LEAF else Action((), (1,), "x")
        return Record(parent, 0, role, 1, path, action=action, **more)

    records = [
        *(node(NO_PARENT, (i,)) for i in range(2)),
        *(node(0, (0, i), multiplicity=3 - 2 * i) for i in range(2)),
        *(node(parent, (0, 9), LEAF, answer="x") for parent in (2, 3, 1)),
    ]
    forest, reward_N = rewarded(records, [1.0, 0.0, 0.0])
    advantage_N, _ = over_siblings(forest, reward_N, group_centred)
    np.testing.assert_allclose(advantage_N, [0.25, -0.25, 0.5, -0.5, 0, 0, 0])


def test_unless_told_otherwise_a_dead_leaf_counts_and_a_merged_sibling_counts_once():
    records = [
        Record(NO_PARENT, 0, "role", 1, (0,)),
        Record(0, 0, "role", 2, (0, 0), multiplicity=3),
        Record(1, 0, LEAF, 3, (0, 0), answer="x"),
        Record(0, 0, LEAF, 2, (0, 1), why="Invalid Format"),
    ]
    value_N, leaves_N = reachable_leaves(*rewarded(records, [1.0, 0.0]))
    np.testing.assert_array_equal(value_N, [0.5, 1, 1, 0])
    np.testing.assert_array_equal(leaves_N, [2, 1, 1, 1])


@pytest.mark.parametrize(
    ("told", "values", "leaves"),
    [
        ({"ignore_dead": True}, [1, 1, 1, 0], [1, 1, 1, 0]),
        ({"multiplicity": True}, [0.75, 1, 1, 0], [4, 1, 1, 1]),
    ],
)
def test_told_so_a_dead_leaf_is_ignored_and_a_merged_sibling_counts_as_sampled(
    told, values, leaves
):
    records = [
        Record(NO_PARENT, 0, "role", 1, (0,)),
        Record(0, 0, "role", 2, (0, 0), multiplicity=3),
        Record(1, 0, LEAF, 3, (0, 0), answer="x"),
        Record(0, 0, LEAF, 2, (0, 1), why="Invalid Format"),
    ]
    value_N, leaves_N = reachable_leaves(*rewarded(records, [1.0, 0.0]), **told)
    np.testing.assert_array_equal(value_N, values)
    np.testing.assert_array_equal(leaves_N, leaves)


@pytest.mark.parametrize(
    "rule", [shared, earned, reachable_leaves, over_rollouts, over_roles, over_siblings]
)
def test_where_every_question_has_failed_there_is_no_credit(rule):
    more = (group_centred,) if rule in (over_rollouts, over_roles, over_siblings) else ()
    for x_N in rule(*rewarded([], []), *more):
        assert x_N.shape == (0,) and x_N.dtype == np.float32


def test_an_action_without_siblings_is_not_to_be_trained():
    records = chains(2)
    for record in records[:2]:
        record.action = Action((), (1,), "x")
    forest, reward_N = rewarded(records, [1.0])
    assert not over_siblings(forest, reward_N, group_centred)[1].any()


def test_credit_of_no_nodes_is_of_no_nodes_whatever_is_padded():
    """At least one block is compiled: nothing has a shape of none."""
    assert padded(np.zeros((0, 3)), 4, -1).shape == (4, 3)
    np.testing.assert_array_equal(padded(np.ones(4), 4), np.ones(4))
    np.testing.assert_array_equal(padded(np.ones(5, np.int32), 4, -1), [1, 1, 1, 1, 1, -1, -1, -1])


def test_rollouts_that_branch_are_not_compared_as_whole_ones():
    records = chains(1)
    records.append(Record(0, 0, LEAF, 1, (), answer="y"))
    forest, reward_N = rewarded(records, [1.0, 1.0])
    with pytest.raises(UserError, match="siblings"):
        over_rollouts(forest, reward_N, group_centred)


def test_the_leaves_of_a_rollout_that_branches_are_not_added_up_to_a_shared_reward():
    records = chains(1)
    records.append(Record(0, 0, LEAF, 1, (), answer="y"))
    forest, reward_N = rewarded(records, [1.0, 1.0])
    with pytest.raises(UserError, match="credit=reachable_leaves"):
        shared(forest, reward_N)
