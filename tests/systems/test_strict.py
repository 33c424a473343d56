"""Strict grammars: every text of a role's language is accepted by its parser."""

import re

import numpy as np
import pytest

from jax_ragrl.rollout.roles import Role
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.c3po import C3PO, render_decision, render_filter, render_router
from jax_ragrl.systems.coda import CoDA
from jax_ragrl.systems.mao_arag import MAOARAG
from jax_ragrl.systems.mmoa_rag import MMOARAG, render_selection
from jax_ragrl.systems.opera.grammar import render_analysis, render_plan, render_rewrite
from jax_ragrl.systems.opera.system import Opera
from jax_ragrl.systems.tags import render_turn
from jax_ragrl.text.automaton import FREE, START, UNPAYABLE, byte_automaton
from tests.tiny import tokenizer

pytest.importorskip("outlines_core")

SYSTEMS = {
    "c3po": C3PO(),
    "mmoa_rag": MMOARAG(),
    "mmoa_rag_tiny": MMOARAG(top_k=4, document_word="D"),
    "coda": CoDA(),
    "mao_arag": MAOARAG(select_needs_search=True),
    "opera": Opera(),
    "search_agent": SearchAgent("search_r1"),
    "adaptive": AdaptiveRAG("baselines", 5),
    "slim_plm": SlimPLM("baselines", 5),
}
ROLES = {
    f"{name}-{role.name}": role
    for name, system in SYSTEMS.items()
    for role in system.roles.values()
}


def walk(role: Role, rng: np.random.Generator, length: int) -> str:
    """Writes uniformly random tokens that the automaton allows, as a sampler would."""
    automaton, state, ids = tokenizer().automaton(role.action_regex), START, []
    stops = set(tokenizer().stop_ids)
    while len(ids) < length:
        costs_V = automaton.cost_SC[state, automaton.class_V]
        choice = int(rng.choice(np.flatnonzero(costs_V <= length - len(ids))))
        if choice in stops:
            break
        ids.append(choice)
        state = int(automaton.next_SC[state, automaton.class_V[choice]])
        assert state != FREE
        if any(stop in tokenizer().decode(ids) for stop in role.stop_strings):
            break
    return tokenizer().decode(ids)


@pytest.mark.parametrize("name", ROLES)
def test_a_parser_accepts_every_text_of_its_strict_grammar(name: str):
    role, rng = ROLES[name], np.random.default_rng(0)
    shortest = tokenizer().automaton(role.action_regex).tokens_left()
    for extra in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        text = walk(role, rng, shortest + extra)
        assert re.fullmatch(role.action_regex, text), text
        assert role.parse(text).valid, (text, role.parse(text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c3po-router", render_router("Retrieval", "Who painted Guernica?")),
        ("c3po-filter", render_filter("Two of them: the first ones.", (1, 10))),
        ("c3po-filter", render_filter("None", ())),
        ("c3po-decision", render_decision("The birthplace is missing.", "Retrieval", "Where, é?")),
        ("c3po-decision", render_decision("All is known", "LLM")),
        ("mmoa_rag-selector", render_selection((0, 4, 9))),
        ("mmoa_rag-selector", ""),
        ("mmoa_rag-generator", "**Star Wars: A New Hope**"),
        ("mmoa_rag-rewriter", "Who was it?\nWhen was it?"),
        ("coda-planner", render_turn(think="First, then.\nSecond.", task="Who was Ann?")),
        ("coda-executor", render_turn(think="a", refine="b", search="c d")),
        ("mao_arag-planner", "QDS"),
        ("mao_arag-sub_planner", "QR,R,DS,AG"),
        ("opera-plan", render_plan(("Who wrote Dune?", "Where was [1] born?"))),
        (
            "opera-plan",
            '[{"subgoal_id": 1, "subgoal": "Who?", "dependencies": []},\n'
            ' {"subgoal_id": 2, "subgoal": "Where is [answer 1]?", "dependencies": [1]}]',
        ),
        ("opera-analysis", render_analysis("The first one says so.", "1969")),
        ("opera-analysis", '{"status": "no", "answer": "", "analysis": "No date."}'),
        ("opera-rewrite", render_rewrite("entity", "Ann Lee birthplace")),
    ],
)
def test_strict_grammars_contain_the_form_of_the_prompts(name: str, text: str):
    assert re.fullmatch(ROLES[name].action_regex, text)
    assert ROLES[name].parse(text).valid


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mmoa_rag-selector", "15147111"),
        ("mmoa_rag-selector", "Document3,Document3"),
        ("mmoa_rag-selector", "Document10"),
        ("c3po-filter", "Thought: a\nAction: [11]"),
        ("c3po-decision", "Thought: Action: [LLM]\nAction: [LLM]"),
        ("mmoa_rag-generator", "**Answer:**"),
        ("mao_arag-sub_planner", "QDS"),
        ("opera-plan", "1 Where was [1] born?"),
    ],
)
def test_strict_grammars_exclude_what_cannot_be_used(name: str, text: str):
    assert not re.fullmatch(ROLES[name].action_regex, text)


@pytest.mark.parametrize("name", ROLES)
def test_the_table_of_a_role_is_small(name: str):
    automaton = tokenizer().automaton(ROLES[name].action_regex)
    tables = automaton.next_SC.nbytes + automaton.cost_SC.nbytes
    assert tables < 1 << 20, (automaton.next_SC.shape, tables)
    # Every state that a match can reach can also finish it.
    states, _ = byte_automaton(ROLES[name].action_regex)
    assert (automaton.cost_SC[START : START + len(states)].min(axis=1) < UNPAYABLE).all()
