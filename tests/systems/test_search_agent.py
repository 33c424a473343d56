from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.systems.baselines import executor
from jax_ragrl.systems.baselines.executor import (
    AGENT,
    SearchAgent,
    autorefine_reward,
    r1_searcher_reward,
    research_reward,
    search_r1_reward,
)
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
    assert tape.log == [
        ("agent",),
        ("search", "Ann born", 1),
        ("agent",),
        ("agent",),
        *tape.log[1:3],
    ]
    documents = "told 1 title 1: text 1"
    assert tape.contexts[-1][2] == (SEARCH, documents, "hm", "told again", SEARCH, documents)
    assert tape.contexts[0][1] == f"search\nQuestion: {ANN.text}"
    assert leaves_of(forest) == [("Ulm", "answered")]


@pytest.mark.parametrize("last", [SEARCH, "hm"])
def test_a_last_turn_search_is_not_performed(last):
    forest, tape = talk(dataclasses.replace(SYSTEM, max_turns=2), {AGENT: [SEARCH, last]})
    assert leaves_of(forest) == [(None, "Out of Turns")]
    assert tape.log.count(("search", "Ann born", 1)) == 1


def test_the_agents_differ_only_in_prompt_and_reward():
    starts = {}
    agents = (executor.AUTOREFINE, executor.SEARCH_R1, executor.R1_SEARCHER)
    for settings in (*agents, executor.RESEARCH, executor.AUTO_RAG):
        system = dataclasses.replace(settings.system, style="coda_tiny", as_chat_turns=True)
        settings = dataclasses.replace(settings, system=system)
        recipe = executor.recipe(settings)
        forest, tape = talk(recipe.system, {AGENT: [SEARCH, REFINED]})
        starts[system.kind] = (tape.contexts[0][1].split()[0], float(recipe.reward(forest)[-1]))
    assert starts == {
        "autorefine": ("search", pytest.approx(0.1)),
        "search_r1": ("look", 0.0),
        "r1_searcher": ("look", 0.0),
        "research": ("look", pytest.approx(0.1)),
        "auto_rag": ("search", 0.0),
    }


def test_search_r1_has_three_turns():
    """The authors would ignore a third search too; the answer after two searches counts."""
    system = executor.recipe(executor.SEARCH_R1).system
    assert leaves_of(talk(system, {AGENT: [SEARCH, SEARCH, FINAL]})[0]) == [("Ulm", "answered")]


def test_auto_rag_has_eleven_turns():
    system = executor.recipe(executor.AUTO_RAG).system
    assert leaves_of(talk(system, {AGENT: [SEARCH] * 10 + [FINAL]})[0]) == [("Ulm", "answered")]
    forest, tape = talk(system, {AGENT: [SEARCH] * 11})
    assert leaves_of(forest) == [(None, "Out of Turns")]
    assert tape.log.count(("search", "Ann born", 3)) == 10


def test_autorefine_earns_f1_or_a_refinement_bonus():
    assert autorefine_reward("Ulm", ("Ulm",), turns(FINAL)) == 1.0
    assert autorefine_reward("old Ulm", ("Ulm",), turns(REFINED)) == pytest.approx(2 / 3)
    assert autorefine_reward("Rom", ("Ulm",), turns(SEARCH, REFINED)) == pytest.approx(0.1)
    assert autorefine_reward("Rom", ("Ulm",), turns(render_turn(think="Ulm", answer="Rom"))) == 0.0
    assert autorefine_reward("Rom", ("no",), turns(render_turn(refine="I do not know"))) == 0.0


def test_search_r1_earns_exact_match():
    assert search_r1_reward("the Ulm!", ("Ulm",), []) == 1.0
    assert search_r1_reward("old Ulm", ("Ulm",), []) == 0.0


@pytest.mark.parametrize("kind", executor.KINDS)
def test_a_missing_answer_is_never_right(kind):
    """TriviaQA has the alias "A" of a vitamin, which is empty after normalization."""
    forest, _ = talk(dataclasses.replace(SYSTEM, max_turns=1), {AGENT: ["hm"]})
    vitamin = dataclasses.replace(forest.questions[0], answers=("Vitamin A", "A"))
    reward_N = executor.reward(forest._replace(questions=(vitamin,)), kind)
    assert reward_N[-1] == (-2.0 if kind == "r1_searcher" else 0.0)


def test_research_earns_f1_or_a_form_bonus():
    assert research_reward("Ulm", ("Ulm",), turns(SEARCH, FINAL)) == 1.0
    assert research_reward("Rom", ("Ulm",), turns(SEARCH, FINAL)) == 0.1
    assert research_reward("Ulm", ("Ulm",), turns(SEARCH, "hm", FINAL)) == 0.0
    assert research_reward("", ("Ulm",), turns(SEARCH)) == 0.0


@pytest.mark.parametrize(
    ("texts", "answer", "reward"),
    [
        ([SEARCH, FINAL], "Ulm", 1.0),
        ([FINAL], "Ulm", 1.0),
        ([SEARCH, FINAL], "Rom", 0.0),
        ([SEARCH, "hm", FINAL], "Ulm", -1.0),  # a turn without an action
        ([SEARCH], "", -2.0),  # no answer
        ([SEARCH + "</search>", FINAL], "Ulm", -1.0),  # tags that do not match
        ([render_turn(answer="Ulm")], "Ulm", -1.0),  # without a thought
        ([FINAL], "Ulm " * 10, 2 / 11),
        ([FINAL], "Ulm " * 11, 2 / 12 - 2),  # too long
    ],
)
def test_r1_searcher_subtracts_two_for_a_violation(texts, answer, reward):
    assert r1_searcher_reward(answer, ("Ulm",), turns(*texts)) == pytest.approx(reward)


def test_the_reward_is_on_the_leaf():
    forest, _ = talk(SYSTEM, {AGENT: [SEARCH, FINAL]})
    reward_N = executor.reward(forest, "search_r1")
    assert reward_N.tolist() == [0.0, 0.0, 1.0] and reward_N.dtype == np.float32


def test_a_critic_needs_no_group():
    """Per turn, each turn earns the full reward; per conversation, only the last turn does."""
    forest, _ = talk(SYSTEM, {AGENT: [SEARCH, FINAL]})
    recipe = executor.recipe(executor.SEARCH_R1)
    reward_N = recipe.reward(forest)
    assert recipe.credit is not None and recipe.turn_credit is not None
    assert recipe.credit(forest, reward_N)[0].tolist()[:2] == [1.0, 1.0]
    assert recipe.turn_credit(forest, reward_N)[0].tolist()[:2] == [0.0, 1.0]


def test_an_unknown_kind_is_rejected():
    with pytest.raises(UserError, match="recipe.system.kind is 'x': use one of autorefine"):
        SearchAgent("x")
