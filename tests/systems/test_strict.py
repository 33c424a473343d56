"""Strict grammars: every text of a role's language is accepted by its parser; the config key."""

import dataclasses
import re

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.policy import check_grammars
from jax_ragrl.rollout.roles import ParsedAction, Role, parse_action
from jax_ragrl.rollout.tree import Action, Record, build_forest
from jax_ragrl.run.load import load_recipe
from jax_ragrl.systems.ablation import with_grammar
from jax_ragrl.systems.base import WrappedSystem
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.c3po import C3PO, render_decision, render_filter, render_router
from jax_ragrl.systems.coda import CoDA
from jax_ragrl.systems.mao_arag import MAOARAG
from jax_ragrl.systems.mmoa_rag import MMOARAG, render_selection
from jax_ragrl.systems.opera.grammar import render_analysis, render_plan, render_rewrite
from jax_ragrl.systems.opera.system import Opera
from jax_ragrl.systems.registry import PAPERS, system_module
from jax_ragrl.systems.tags import render_turn
from jax_ragrl.text.automaton import FREE, START, UNPAYABLE, byte_automaton
from jax_ragrl.training.rollout_metrics import removed_masses
from jax_ragrl.types import Sampling
from tests.rollout.tape import ANN
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


def recipe_of(name: str):
    module = system_module(name)
    return module.recipe(module.Settings())


@pytest.mark.parametrize("name", PAPERS)
def test_every_role_of_every_system_can_be_strict(name: str):
    recipe = recipe_of(name)
    strict = with_grammar(recipe, "strict")
    for system in (strict.system, strict.evaluation_system):
        assert system.roles and all(role.strict for role in system.roles.values())
        check_grammars(system.roles.values(), tokenizer())
    assert with_grammar(recipe, "loose") is recipe
    assert not any(role.strict for role in recipe.system.roles.values())


@pytest.mark.parametrize("name", ["c3po", "mao_arag"])
@pytest.mark.parametrize("choice", [{}, {"grammar": "strict"}, {"thinking": "on"}])
def test_roles_of_fixed_strategies_are_those_of_the_evaluation(name, choice):
    """Own policies, strict grammars and thinking; the workflows of MAO-ARAG have no roles."""
    names = [*recipe_of(name).system.roles]
    policies = tuple((role, "") for role in names)
    recipe = load_recipe({"system": name, "policies": policies, **choice})
    assert recipe.fixed_strategies
    for system in recipe.fixed_strategies.values():
        assert len(system.roles) == (len(names) - 1 if name == "c3po" else 0)
        for role in system.roles.values():
            assert role == recipe.evaluation_system.roles[role.name]
            is_strict, thinks = "grammar" in choice, "thinking" in choice
            assert (role.policy, role.strict, role.thinking) == (role.name, is_strict, thinks)


@pytest.mark.parametrize("name", ["coda", "jax_ragrl.systems.baselines.executor"])
def test_a_strict_role_whose_grammar_has_think_tags_thinks(name):
    text = "<think>One hop.</think>\n<answer>Ulm</answer>"
    recipe = load_recipe({"system": name, "grammar": "strict", "thinking": "on"})
    for role in recipe.system.roles.values():
        assert role.strict and role.thinking
        assert re.fullmatch(role.action_regex, text) and parse_action(role, text).valid


class WithoutRegex(WrappedSystem):
    @property
    def roles(self):
        return {"free": Role("free", ParsedAction)}


def test_a_grammar_that_a_system_lacks_or_its_limit_cuts_is_an_error():
    recipe = recipe_of("coda")
    recipe = dataclasses.replace(recipe, system=WithoutRegex(recipe.system))
    with pytest.raises(UserError, match="role free of this system has no regular expression"):
        with_grammar(recipe, "strict")

    def role(tokens: int) -> Role:
        return Role(
            "plan", ParsedAction, Sampling(1.0, 1.0, tokens), action_regex="[0-9]{4}", strict=True
        )

    check_grammars([role(4)], tokenizer())
    with pytest.raises(UserError, match="may write 3 tokens, but the shortest .* has 4"):
        check_grammars([role(3)], tokenizer())


def test_removed_mass_is_a_mean_over_the_sampled_tokens_of_a_role():
    def record(k: int, tokens: int, removed: float | None, times: int = 1) -> Record:
        ids, logps = (5,) * tokens, None if removed is None else (-1.0,) * tokens
        action = Action((1,), ids, "x", logps, removed=removed)
        return Record(-1, 0, "plan", 1, (k,), action, multiplicity=times)

    forest = build_forest((ANN,), [record(0, 1, 0.5), record(1, 3, 0.1, 2), record(2, 4, None)])
    (name, value), *rest = removed_masses(forest).items()
    assert name == "grammar_removed/plan" and not rest
    np.testing.assert_allclose(value, (0.5 + 6 * 0.1) / 7)
    assert removed_masses(build_forest((ANN,), [record(0, 4, None)])) == {}
