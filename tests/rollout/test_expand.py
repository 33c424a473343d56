from __future__ import annotations

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, Forced, Tree, once
from jax_ragrl.systems.c3po import TreeShape
from tests.rollout.tape import PAPER, Tape, improvise, play
from tests.rollout.test_collect import QUESTIONS


def at(depth: int, role: str = "filter") -> Generate:
    return Generate(role, (), depth)


def test_once_is_one_action_everywhere():
    assert [once(at(depth), "q") for depth in (1, 9)] == [Branching(1), Branching(1)]


@pytest.mark.parametrize(
    ("width", "until", "expected"),
    [(2, 4, [2, 2, 2, 2, 1, 1]), (3, 1, [3, 1, 1, 1, 1, 1]), (2, 0, [1] * 6)],
)
def test_width_siblings_down_to_a_depth_and_one_below(width, until, expected):
    tree = Tree(width, until)
    assert [tree(at(depth), "q").samples for depth in range(1, 7)] == expected


def test_a_forced_role_samples_nothing_besides_unless_it_is_free_to():
    tree = Tree(forced={"router": (Forced("[Planning]"), Forced("[Retrieval] ", complete=False))})
    assert tree(at(1, "router"), "q") == Branching(0, tree.forced["router"])
    assert tree(at(1, "filter"), "q") == Branching(2)
    freed = Tree(forced=tree.forced, free=1)
    assert freed(at(1, "router"), "q") == Branching(1, tree.forced["router"])


def test_a_free_action_that_repeats_a_forced_one_is_the_same_branch():
    tree = Tree(forced={"router": (Forced("[No Retrieval]"),)}, free=2)
    tape = Tape({"router": ["[No Retrieval]", "nonsense"]})
    forest = play(tape, QUESTIONS[0], expander=tree)
    assert [r.role for r in forest.records] == ["router", "router", "leaf", "leaf"]
    assert forest.multiplicity_N[:2].tolist() == [2, 1]
    assert [forest.records[i].why for i in (2, 3)] == ["Invalid Format", "answered"]


def test_forced_texts_hold_the_question_and_it_is_not_scanned_again():
    tree = Tree(forced={"router": (Forced("a $question b", complete=False),)})
    assert tree(at(1, "router"), "$question?").forced == (Forced("a $question? b", False),)


def distinct(role: str, prompt: str, rng) -> str:
    word = f"{rng.random()}"
    if role == "filter":
        return f"Thought: {word}\nAction: [1]"
    return f"Thought: {word}\nAction: [Retrieval] {word}"


def test_the_papers_tree_has_seven_leaves_where_all_actions_differ():
    # One without retrieval, two filters of a single pass, and two decisions by two filters.
    forest = play(Tape(distinct), *QUESTIONS, expander=PAPER)
    leaves = [int(forest.leaf_N[forest.nodes_of(i)].sum()) for i in range(len(QUESTIONS))]
    assert leaves == [7] * len(QUESTIONS)


def test_the_papers_tree_never_has_more_than_seven_leaves():
    forest = play(Tape(improvise), *QUESTIONS, expander=PAPER)
    leaves = [int(forest.leaf_N[forest.nodes_of(i)].sum()) for i in range(len(QUESTIONS))]
    assert min(leaves) >= 3 and max(leaves) <= 7


def test_two_roadmaps_give_eleven_leaves():
    tape = Tape(distinct, told={"roadmap": lambda request: str(request.seed)})
    forest = play(tape, QUESTIONS[0], expander=PAPER, roadmaps=2)
    assert int(forest.leaf_N.sum()) == 11


def test_a_tree_of_width_one_whose_router_is_sampled_is_a_single_trajectory():
    """The paper's ablation without trees: one leaf, whose reward each action gets (section 6.4)."""
    tree = TreeShape(width=1, retrieval="sampled").expander()
    texts = {"router": "[Planning]", "decision": "Thought: t\nAction: [LLM]"}
    forest = play(Tape(lambda role, *_: texts[role]), QUESTIONS[0], expander=tree)
    assert [r.role for r in forest.records] == ["router", "decision", "leaf"]
    assert forest.parent_N.tolist() == [-1, 0, 1] and not forest.forced_N.any()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"retrieval": "x"}, "tree.retrieval is 'x': use one of prefix, text, sampled"),
        ({"retrieval": "sampled", "free": 1}, "tree.free is for a forced router"),
        ({"dead_leaf": "x"}, "tree.dead_leaf is 'x': it must be zero or ignore"),
    ],
)
def test_a_tree_that_cannot_be_grown_is_refused_before_a_run(shape, message):
    with pytest.raises(UserError, match=message):
        TreeShape(**shape)
