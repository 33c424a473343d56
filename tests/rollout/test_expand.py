import collections
import dataclasses
import random

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, ForcedAction, Growth, Tree
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Record, build_forest
from jax_ragrl.systems.base import path_from_root
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.systems.c3po import TreeShape
from jax_ragrl.systems.tags import render_turn
from jax_ragrl.types import Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, play, talk
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
    tree = Tree(forced_actions={"router": (ForcedAction("a $question b", complete=False),)})
    assert tree(at(1, "router"), "$question?").forced_actions == (
        ForcedAction("a $question? b", False),
    )


def test_a_sample_equal_to_a_forced_action_is_merged():
    tree = Tree(forced_actions={"router": (ForcedAction("[No Retrieval]"),)}, free_samples=2)
    tape = Tape({"router": ["[No Retrieval]", "nonsense"]})
    forest = play(tape, QUESTIONS[0], expander=tree)
    assert [r.role for r in forest.records] == ["router", "router", "leaf", "leaf"]
    assert forest.multiplicity_N[:2].tolist() == [2, 1]
    assert [forest.records[i].finish_reason for i in (2, 3)] == ["Invalid Format", "answered"]


def distinct(role: str, prompt: str, rng) -> str:
    word = f"{rng.random()}"
    if role == "filter":
        return f"Thought: {word}\nAction: [1]"
    return f"Thought: {word}\nAction: [Retrieval] {word}"


def test_the_papers_tree_has_seven_leaves_and_its_ablation_a_single_chain():
    # One leaf without retrieval, two by the filters of a single search, and two decisions with
    # two filters each.
    forest = play(Tape(distinct), *QUESTIONS, expander=PAPER)
    leaves = [int(forest.leaf_N[forest.nodes_of(i)].sum()) for i in range(len(QUESTIONS))]
    assert leaves == [7] * len(QUESTIONS)
    # The ablation without trees (section 6.4): each action has the reward of one leaf.
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


def record(parent: int, question: int = 0, role: str = "router", **values) -> Record:
    return Record(parent, question, role, depth=1, path=(), **values)


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


AGENT_SYSTEM = SearchAgent("search_r1", "coda_tiny", 1, 4, as_chat_turns=True)


def write(role: str, prompt: str, rng: random.Random) -> str:
    """One of four searches, or of two answers."""
    word = rng.choice("abcdef")
    kind = {"answer": word} if word in "ef" else {"search": word}
    return render_turn(think="t", **kind)


@pytest.mark.parametrize("lockstep", [True, False])
def test_trees_grow_by_the_same_number_of_rollouts_wherever_they_branch(lockstep):
    questions = [Question(f"q{i}", f"Where was {i} born?", ("Ulm",)) for i in range(30)]
    settings = {"rollouts": 2, "growth": Growth(2, 3), "lockstep": lockstep}
    forest, _ = talk(AGENT_SYSTEM, write, *questions, **settings)
    # An action that was drawn again is one node, whose rollout goes on once.
    again = forest.multiplicity_N - 1
    trees = [(r.question, r.path[0]) for r in forest.records]
    for tree in set(trees):
        nodes = [n for n, name in enumerate(trees) if name == tree]
        assert forest.leaf_N[nodes].sum() + again[nodes].sum() == 1 + 2 * 3
    assert again.sum() > 10
    # A leaf pays for the searches on its own path.
    for leaf in np.flatnonzero(forest.leaf_N):
        path = [forest.records[n] for n in path_from_root(forest, leaf)]
        queries = [r.parsed.args[0] for r in path if r.parsed and r.parsed.action == "search"]
        assert [call.request for call in forest.records[leaf].calls] == queries[:3]  # no last one
    # No question depends on the others in its batch, nor on the order of replies.
    alone, _ = talk(AGENT_SYSTEM, write, questions[7], **settings | {"lockstep": True})
    rows = [r for r in forest.records if r.question == 7]
    assert [(r.path, r.action, r.multiplicity, r.round, r.answer) for r in rows] == [
        (r.path, r.action, r.multiplicity, r.round, r.answer) for r in alone.records
    ]


def test_growth_draws_each_decision_and_each_action_equally_often():
    """With three decisions per chain; by chance a count misses these bounds once in 10,000 runs."""
    questions = [Question(f"q{i}", f"Where was {i} born?", ("Ulm",)) for i in range(600)]
    agent = dataclasses.replace(AGENT_SYSTEM, max_turns=3)

    def search(role: str, prompt: str, rng: random.Random) -> str:
        return render_turn(think="t", search=rng.choice("ab"))

    forest, _ = talk(agent, search, *questions, growth=Growth(1, 1))
    counts, same = collections.Counter(), 0
    for question in range(len(questions)):
        nodes = [n for n in forest.nodes_of(question) if not forest.leaf_N[n]]
        (grown,) = [forest.records[n] for n in nodes if forest.multiplicity_N[n] > 1] or [
            next(forest.records[n] for n in nodes if forest.records[n].path[-1] == 1)
        ]
        counts[grown.depth] += 1
        same += grown.multiplicity > 1
    assert sorted(counts) == [1, 2, 3]
    assert all(abs(count - 200) < 4 * (600 * 2 / 9) ** 0.5 for count in counts.values())
    assert abs(same - 300) < 4 * (600 / 4) ** 0.5


def test_growth_weighs_what_happened():
    seen = []

    def weigh(groups):
        seen.append([[r.parsed.args[0] for r in group] for group in groups])
        return [float(group[0].passages == ()) + 1e-9 for group in groups]

    texts = {
        "agent": [
            render_turn(think="t", search="a"),
            *(render_turn(think="t", answer=x) for x in "xy"),
        ]
    }
    forest, _ = talk(AGENT_SYSTEM, texts, growth=Growth(1, 1, weigh))
    assert seen == [[["a"], ["x"]]]
    assert [r.answer for r in forest.records if r.role == LEAF] == ["x", "y"]
