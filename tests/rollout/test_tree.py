from __future__ import annotations

import numpy as np
import pytest

from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Record, build_forest, sibling_groups
from tests.rollout.tape import ANN, BOB, Tape, improvise, play
from tests.rollout.test_collect import QUESTIONS, twice
from tests.rollout.test_several import fan


def record(parent: int, question: int = 0, role: str = "router", **values) -> Record:
    return Record(parent, question, role, depth=1, path=(), **values)


def test_every_child_comes_after_its_parent_and_belongs_to_its_question():
    forest = play(Tape(improvise), *QUESTIONS, expander=twice)
    parent_N, number_N = forest.parent_N, np.arange(len(forest.records))
    assert (parent_N < number_N).all() and (parent_N >= NO_PARENT).all()
    below_N = parent_N >= 0
    assert (forest.question_N[parent_N[below_N]] == forest.question_N[below_N]).all()


def test_only_childless_nodes_are_leaves_with_rewards():
    forest = play(Tape(improvise), *QUESTIONS, expander=twice)
    assert sorted(set(range(len(forest.records))) - set(forest.parent_N.tolist())) == (
        np.flatnonzero(forest.leaf_N).tolist()
    )
    assert not forest.reward_N[~forest.leaf_N].any() and forest.reward_N.any()
    assert forest.unanswered_N.any() and not forest.unanswered_N[~forest.leaf_N].any()
    assert not forest.reward_N[forest.unanswered_N].any()


def test_leaving_out_a_failed_question_renumbers_parents():
    rows = [
        record(NO_PARENT, 0),
        record(NO_PARENT, 1),
        record(0, 0, LEAF, answer="a"),
        record(1, 1, multiplicity=3, is_forced=True),
        record(3, 1, LEAF),
    ]
    forest = build_forest((ANN, BOB), rows, {0: "away"})
    assert forest.parent_N.tolist() == [NO_PARENT, 0, 1]
    assert [r.parent for r in forest.records] == [NO_PARENT, 0, 1]
    assert forest.question_N.tolist() == [1, 1, 1] and forest.failed_questions == (0,)
    assert forest.failures == ("away",)
    assert forest.leaf_N.tolist() == forest.unanswered_N.tolist() == [False, False, True]
    assert forest.forced_N.tolist() == [False, True, False]
    assert forest.multiplicity_N.tolist() == [1, 3, 1]
    assert rows[3].parent == 1  # the arguments are not modified


def test_an_empty_answer_is_an_answer_and_none_is_not():
    rows = [record(NO_PARENT), *(record(0, role=LEAF, answer=a) for a in ("", None, "x"))]
    assert build_forest((ANN,), rows).unanswered_N.tolist() == [False, False, True, False]


@pytest.mark.parametrize("why", ["Max Depth", "Out of Turns", "Out of Rewrites", "Missing Answer"])
def test_limits_and_answers_are_not_parse_errors(why):
    assert record(0, role=LEAF, finish_reason=why).parse_error == ""
    assert record(0, role=LEAF, finish_reason="Invalid Format").parse_error == "Invalid Format"
    assert (
        record(0, role=LEAF, answer="x", finish_reason="answered, Unknown Document").parse_error
        == ""
    )


def test_concurrent_actions_are_separate_sibling_groups():
    """Two concurrent actions of one state are not alternatives to each other."""
    forest = fan()
    assert sibling_groups(forest) == [[0], [1]]


def test_the_arrays_have_their_declared_dtypes():
    for forest in (build_forest((ANN,), [record(NO_PARENT)]), build_forest((), [])):
        dtypes = [x.dtype for x in forest[1:8]]
        assert dtypes == [np.int32, np.int32, bool, bool, bool, np.float32, np.int32]
