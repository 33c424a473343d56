from __future__ import annotations

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, ForcedAction, Tree
from jax_ragrl.systems.c3po import TreeShape
from tests.rollout.tape import PAPER, Tape, play
from tests.rollout.test_collect import QUESTIONS


def at(depth: int, role: str = "filter") -> Generate:
    return Generate(role, (), depth)


@pytest.mark.parametrize(
    ("width", "until", "expected"),
    [(2, 4, [2, 2, 2, 2, 1, 1]), (3, 1, [3, 1, 1, 1, 1, 1]), (2, 0, [1] * 6)],
)
def test_a_tree_branches_down_to_its_depth(width, until, expected):
    tree = Tree(width, until)
    assert [tree(at(depth), "q").samples for depth in range(1, 7)] == expected


def test_a_forced_role_samples_only_its_free_actions():
    tree = Tree(
        forced_actions={
            "router": (ForcedAction("[Planning]"), ForcedAction("[Retrieval] ", complete=False))
        }
    )
    assert tree(at(1, "router"), "q") == Branching(0, tree.forced_actions["router"])
    assert tree(at(1, "filter"), "q") == Branching(2)
    with_free_samples = Tree(forced_actions=tree.forced_actions, free_samples=1)
    assert with_free_samples(at(1, "router"), "q") == Branching(1, tree.forced_actions["router"])


def test_a_sample_equal_to_a_forced_action_is_merged():
    tree = Tree(forced_actions={"router": (ForcedAction("[No Retrieval]"),)}, free_samples=2)
    tape = Tape({"router": ["[No Retrieval]", "nonsense"]})
    forest = play(tape, QUESTIONS[0], expander=tree)
    assert [r.role for r in forest.records] == ["router", "router", "leaf", "leaf"]
    assert forest.multiplicity_N[:2].tolist() == [2, 1]
    assert [forest.records[i].finish_reason for i in (2, 3)] == ["Invalid Format", "answered"]


def test_a_question_in_a_forced_text_is_filled_in_once():
    tree = Tree(forced_actions={"router": (ForcedAction("a $question b", complete=False),)})
    assert tree(at(1, "router"), "$question?").forced_actions == (
        ForcedAction("a $question? b", False),
    )


def distinct(role: str, prompt: str, rng) -> str:
    word = f"{rng.random()}"
    if role == "filter":
        return f"Thought: {word}\nAction: [1]"
    return f"Thought: {word}\nAction: [Retrieval] {word}"


def test_the_papers_tree_has_seven_leaves_if_all_actions_differ():
    # One leaf without retrieval, two by the filters of a single search, and two decisions with
    # two filters each.
    forest = play(Tape(distinct), *QUESTIONS, expander=PAPER)
    leaves = [int(forest.leaf_N[forest.nodes_of(i)].sum()) for i in range(len(QUESTIONS))]
    assert leaves == [7] * len(QUESTIONS)


def test_a_sampled_router_and_width_one_give_a_single_chain():
    """The paper's ablation without trees (section 6.4): each action has the reward of one leaf."""
    tree = TreeShape(width=1, router_forcing="sampled").expander()
    texts = {"router": "[Planning]", "decision": "Thought: t\nAction: [LLM]"}
    forest = play(Tape(lambda role, *_: texts[role]), QUESTIONS[0], expander=tree)
    assert [r.role for r in forest.records] == ["router", "decision", "leaf"]
    assert forest.parent_N.tolist() == [-1, 0, 1] and not forest.forced_N.any()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"router_forcing": "x"}, "router_forcing is 'x': use one of prefix, text, no_planning, s"),
        ({"router_forcing": "sampled", "router_samples": 1}, "router_samples is 1.*set .*to 0"),
    ],
)
def test_invalid_tree_settings_are_refused(shape, message):
    with pytest.raises(UserError, match=message):
        TreeShape(**shape)
