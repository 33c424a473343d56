"""The config key `grammar`."""

import dataclasses
import re

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.policy import check_grammars
from jax_ragrl.rollout.roles import ParsedAction, Role, parse_action
from jax_ragrl.rollout.tree import Action, Record, build_forest
from jax_ragrl.run.load import load_recipe
from jax_ragrl.systems.ablation import with_grammar, with_own_policies
from jax_ragrl.systems.base import WrappedSystem
from jax_ragrl.systems.registry import PAPERS, system_module
from jax_ragrl.training.rollout_metrics import removed_masses
from jax_ragrl.types import Sampling
from tests.rollout.tape import ANN
from tests.tiny import tokenizer

pytest.importorskip("outlines_core")


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


def test_a_role_with_its_own_policy_can_be_strict():
    both = with_grammar(with_own_policies(recipe_of("mmoa_rag"), ["selector"]), "strict")
    role = both.system.roles["selector"]
    assert role.strict and role.policy == "selector"


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


def strict_and_thinking(name: str):
    return load_recipe({"system": name, "grammar": "strict", "thinking": "on"})


@pytest.mark.parametrize(
    ("name", "role"),
    [("c3po", "router"), ("mao_arag", "planner"), ("mmoa_rag", "rewriter"), ("opera", "plan")],
)
def test_a_strict_role_whose_grammar_has_no_think_tags_cannot_think(name, role):
    with pytest.raises(UserError, match=f"role {role} has no think tags.*'loose', or thinking 'of"):
        strict_and_thinking(name)


@pytest.mark.parametrize("name", ["coda", "jax_ragrl.systems.baselines.executor"])
def test_a_strict_role_whose_grammar_has_think_tags_thinks(name):
    text = "<think>One hop.</think>\n<answer>Ulm</answer>"
    for role in strict_and_thinking(name).system.roles.values():
        assert role.strict and role.thinking
        assert re.fullmatch(role.action_regex, text) and parse_action(role, text).valid


class WithoutRegex(WrappedSystem):
    @property
    def roles(self):
        return {"free": Role("free", ParsedAction)}


def test_a_grammar_that_a_system_lacks_is_an_error():
    with pytest.raises(UserError, match="one of loose, strict"):
        with_grammar(recipe_of("coda"), "tight")
    recipe = recipe_of("coda")
    recipe = dataclasses.replace(recipe, system=WithoutRegex(recipe.system))
    with pytest.raises(UserError, match="role free of this system has no regular expression"):
        with_grammar(recipe, "strict")


def test_a_limit_below_the_shortest_action_is_an_error():
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
