from __future__ import annotations

import numpy as np
import pytest

from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Record, decisions, plant
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


def test_only_childless_nodes_are_leaves_and_only_they_earn():
    forest = play(Tape(improvise), *QUESTIONS, expander=twice)
    assert sorted(set(range(len(forest.records))) - set(forest.parent_N.tolist())) == (
        np.flatnonzero(forest.leaf_N).tolist()
    )
    assert not forest.reward_N[~forest.leaf_N].any() and forest.reward_N.any()
    assert forest.dead_N.any() and not forest.dead_N[~forest.leaf_N].any()
    assert not forest.reward_N[forest.dead_N].any()


def test_planting_without_a_failed_question_renumbers_the_parents():
    rows = [
        record(NO_PARENT, 0),
        record(NO_PARENT, 1),
        record(0, 0, LEAF, answer="a"),
        record(1, 1, multiplicity=3, forced=True),
        record(3, 1, LEAF),
    ]
    forest = plant((ANN, BOB), rows, {0: "away"})
    assert forest.parent_N.tolist() == [NO_PARENT, 0, 1]
    assert [r.parent for r in forest.records] == [NO_PARENT, 0, 1]
    assert forest.question_N.tolist() == [1, 1, 1] and forest.failed == (0,)
    assert forest.failures == ("away",)
    assert forest.leaf_N.tolist() == forest.dead_N.tolist() == [False, False, True]
    assert forest.forced_N.tolist() == [False, True, False]
    assert forest.multiplicity_N.tolist() == [1, 3, 1]
    assert rows[3].parent == 1  # the records given are left as they are


def test_an_answer_of_no_words_is_an_answer_and_none_is_a_dead_end():
    rows = [record(NO_PARENT), *(record(0, role=LEAF, answer=a) for a in ("", None, "x"))]
    assert plant((ANN,), rows).dead_N.tolist() == [False, False, True, False]


@pytest.mark.parametrize("why", ["Max Depth", "Out of Turns", "Out of Rewrites", "Missing Answer"])
def test_a_limit_is_nobodys_fault_and_neither_is_an_answer(why):
    assert record(0, role=LEAF, why=why).fault == ""
    assert record(0, role=LEAF, why="Invalid Format").fault == "Invalid Format"
    assert record(0, role=LEAF, answer="x", why="answered, Unknown Document").fault == ""


def test_actions_in_a_line_are_decisions_of_their_own():
    """Two written at once in one state were not tried instead of each other."""
    forest = fan()
    assert decisions(forest) == [[0], [1]]


def test_the_arrays_have_their_declared_dtypes():
    for forest in (plant((ANN,), [record(NO_PARENT)]), plant((), [])):
        dtypes = [x.dtype for x in forest[1:8]]
        assert dtypes == [np.int32, np.int32, bool, bool, bool, np.float32, np.int32]


def test_nodes_of_a_question_are_all_and_only_its_own():
    forest = play(Tape(improvise), *QUESTIONS, expander=twice)
    numbers = [forest.nodes_of(i).tolist() for i in range(len(QUESTIONS))]
    assert sorted(sum(numbers, [])) == list(range(len(forest.records)))
    assert all(part == sorted(part) for part in numbers)
