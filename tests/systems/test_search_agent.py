"""Agents that search in one context, and their trees of rollouts (Tree-GRPO)."""

import dataclasses

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_normalised
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.rollout.tree import LEAF
from jax_ragrl.systems.baselines import executor, tree_grpo
from jax_ragrl.systems.baselines.executor import (
    AGENT,
    SearchAgent,
    autorefine_reward,
    r1_searcher_reward,
    research_reward,
    search_r1_reward,
)
from jax_ragrl.systems.baselines.tree_grpo import Settings
from jax_ragrl.systems.tags import render_turn
from tests.rollout.tape import ANN, leaves_of, talk

SYSTEM = SearchAgent("autorefine", "coda_tiny", top_k=1, as_chat_turns=True)
SEARCH = render_turn(think="born", search="Ann born")
REFINED = render_turn(refine="Ann was born in Ulm", answer="Rom")
FINAL = render_turn(think="done", answer="Ulm")


def turns(*texts: str) -> list[ParsedAction]:
    parse = SYSTEM.roles[AGENT].parse
    return [parse(text)._replace(text=text) for text in texts]


def test_one_context_contains_the_complete_search():
    forest, tape = talk(SYSTEM, {AGENT: [SEARCH, "hm", SEARCH, FINAL]})
    turn, search = ("agent",), ("search", "Ann born", 1)
    assert tape.log == [turn, search, turn, turn, search, turn]
    documents = "told 1 title 1: text 1"
    assert tape.contexts[-1][2] == (SEARCH, documents, "hm", "told again", SEARCH, documents)
    assert tape.contexts[0][1] == f"search\nQuestion: {ANN.text}"
    assert leaves_of(forest) == [("Ulm", "answered")]


def test_the_agents_differ_only_in_prompt_and_reward():
    starts = {}
    for kind in executor.KINDS:
        recipe = executor.recipe(executor.Settings(dataclasses.replace(SYSTEM, kind=kind)))
        forest, tape = talk(recipe.system, {AGENT: [SEARCH, REFINED]})
        starts[kind] = (tape.contexts[0][1].split()[0], float(recipe.reward(forest)[-1]))
    assert starts == {
        "autorefine": ("search", pytest.approx(0.1)),
        "search_r1": ("look", 0.0),
        "r1_searcher": ("look", 0.0),
        "research": ("look", pytest.approx(0.1)),
        "auto_rag": ("search", 0.0),
    }


@pytest.mark.parametrize("kind", executor.KINDS)
def test_a_missing_answer_is_never_right(kind):
    """TriviaQA has the alias "A" of a vitamin, which is empty after normalization."""
    forest, _ = talk(dataclasses.replace(SYSTEM, max_turns=1), {AGENT: ["hm"]})
    vitamin = dataclasses.replace(forest.questions[0], answers=("Vitamin A", "A"))
    reward_N = executor.reward(forest._replace(questions=(vitamin,)), kind)
    assert reward_N[-1] == (-2.0 if kind == "r1_searcher" else 0.0)


@pytest.mark.parametrize(("settings", "turns"), [(executor.SEARCH_R1, 3), (executor.AUTO_RAG, 11)])
def test_the_last_turn_is_for_the_answer(settings, turns):
    """The authors of Search-R1 would ignore a third search too."""
    system = executor.recipe(settings).system
    searches = [SEARCH] * (turns - 1)
    assert leaves_of(talk(system, {AGENT: [*searches, FINAL]})[0]) == [("Ulm", "answered")]
    forest, tape = talk(system, {AGENT: [*searches, SEARCH]})
    assert leaves_of(forest) == [(None, "Out of Turns")]
    assert tape.log.count(("search", "Ann born", 3)) == turns - 1


BARE = render_turn(answer="Ulm")  # without a thought


@pytest.mark.parametrize(
    ("reward", "texts", "answer", "expected"),
    [
        (autorefine_reward, [FINAL], "Ulm", 1.0),
        (autorefine_reward, [REFINED], "old Ulm", 2 / 3),
        (autorefine_reward, [SEARCH, REFINED], "Rom", 0.1),
        (autorefine_reward, [render_turn(think="Ulm", answer="Rom")], "Rom", 0.0),
        (autorefine_reward, [render_turn(refine="I know Ulmer")], "Rom", 0.0),  # whole words
        (search_r1_reward, [], "the Ulm!", 1.0),
        (search_r1_reward, [], "old Ulm", 0.0),
        (research_reward, [SEARCH, FINAL], "Ulm", 1.0),
        (research_reward, [SEARCH, FINAL], "Rom", 0.1),
        (research_reward, [SEARCH, "hm", FINAL], "Ulm", 0.0),
        (research_reward, [SEARCH], "", 0.0),
        (r1_searcher_reward, [SEARCH, FINAL], "Ulm", 1.0),
        (r1_searcher_reward, [FINAL], "Ulm", 1.0),
        (r1_searcher_reward, [SEARCH, FINAL], "Rom", 0.0),
        (r1_searcher_reward, [SEARCH, "hm", FINAL], "Ulm", -1.0),  # a turn without an action
        (r1_searcher_reward, [SEARCH], "", -2.0),  # no answer
        (r1_searcher_reward, [SEARCH + "</search>", FINAL], "Ulm", -1.0),  # tags do not match
        (r1_searcher_reward, [BARE], "Ulm", -1.0),
        (r1_searcher_reward, [FINAL], "Ulm " * 10, 2 / 11),
        (r1_searcher_reward, [FINAL], "Ulm " * 11, 2 / 12 - 2),  # too long
    ],
)
def test_each_agent_has_the_reward_of_its_paper(reward, texts, answer, expected):
    assert reward(answer, ("Ulm",), turns(*texts)) == pytest.approx(expected)


def test_a_critic_needs_no_group():
    """Per turn, each turn earns the full reward; per conversation, only the last turn does."""
    forest, _ = talk(SYSTEM, {AGENT: [SEARCH, FINAL]})
    recipe = executor.recipe(executor.SEARCH_R1)
    reward_N = recipe.reward(forest)
    assert recipe.credit is not None and recipe.turn_credit is not None
    assert recipe.credit(forest, reward_N)[0].tolist()[:2] == [1.0, 1.0]
    assert recipe.turn_credit(forest, reward_N)[0].tolist()[:2] == [0.0, 1.0]


AGENT_SYSTEM = executor.SearchAgent("search_r1", "coda_tiny", 1, 4, as_chat_turns=True)


def look(query: str) -> str:
    return render_turn(think="t", search=query)


def outputs(answer: str) -> str:
    return render_turn(think="t", answer=answer)


def test_the_advantage_is_the_sum_of_that_in_the_tree_and_in_the_question():
    """Two trees for Ann, each with a search and two answers: right and wrong, both wrong."""
    recipe = tree_grpo.recipe(Settings(AGENT_SYSTEM, rounds=1, actions=1))
    # The last decision of a tree is drawn, so that its first turn is shared.
    growth = recipe.growth._replace(weigh=lambda groups: [0.0] * (len(groups) - 1) + [1.0])
    answers = [outputs(answer) for answer in ("Ulm", "Rom", "Rom", "Bonn")]
    forest, _ = talk(
        *(recipe.system, {AGENT: [look("a"), look("b"), *answers]}),
        rollouts=recipe.rollouts,
        growth=growth,
    )
    assert [answer for answer, _ in leaves_of(forest)] == ["Ulm", "Rom", "Rom", "Bonn"]
    credit_N, weight_N = recipe.compare(forest, recipe.reward(forest), rule=group_normalised)
    # Of the question's four: mean 1/4, deviation 1/2. Of the first tree's two: 1/2, sqrt(1/2).
    right = 0.75 / 0.5 + 0.5 / np.sqrt(0.5)
    wrong = -0.25 / 0.5 - 0.5 / np.sqrt(0.5)
    other = -0.25 / 0.5 + 0.0
    leaves = [i for i, r in enumerate(forest.records) if r.role == LEAF]
    np.testing.assert_allclose(credit_N[leaves], [right, wrong, other, other], atol=1e-5)
    # A shared turn has the mean of its rollouts, and their number.
    roots = sorted(set(forest.roots().tolist()))
    np.testing.assert_allclose(credit_N[roots], [(right + wrong) / 2, other], atol=1e-5)
    assert weight_N[roots].tolist() == [2.0, 2.0]


def test_two_first_turns_of_a_tree_are_compared_with_each_other():
    recipe = tree_grpo.recipe(Settings(AGENT_SYSTEM, rounds=1, actions=1))
    growth = recipe.growth._replace(weigh=lambda groups: [1.0] + [0.0] * (len(groups) - 1))
    answers = [outputs(answer) for answer in ("Ulm", "Rom", "Bonn", "Oslo")]
    forest, _ = talk(recipe.system, {AGENT: answers}, rollouts=2, growth=growth)
    credit_N, _ = recipe.compare(forest, recipe.reward(forest), rule=group_normalised)
    by_answer = {r.answer: c for r, c in zip(forest.records, credit_N, strict=True) if r.answer}
    in_tree = 0.5 / np.sqrt(0.5)
    expected = {"Ulm": 1.5 + in_tree, "Bonn": -0.5 - in_tree, "Rom": -0.5, "Oslo": -0.5}
    assert by_answer == pytest.approx(expected, abs=1e-5)
