"""Builds the job of a run from the values of its config, and the recipe of its system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.functions import own_code
from jax_ragrl.config.ranges import Natural
from jax_ragrl.config.schema import build, convert
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.system import check_members
from jax_ragrl.run.config import Job
from jax_ragrl.systems.ablation import (
    LOOSE,
    OWN,
    with_credit,
    with_grammar,
    with_own_policies,
    with_thinking,
)
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.registry import system_module


def load_job(values: Mapping[str, Any]) -> Job:
    """Builds a job from the values of a config: `system` names a system, `recipe` its settings."""
    values = with_default_index(values)
    return build(Job, {"recipe": load_recipe(values), **values})


def with_default_index(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config in which files without a section `index` are searched with BM25.

    A generated world keeps the default of `Job`, hashed words.
    """
    data = values.get("data")
    has_files = isinstance(data, Mapping) and bool(data.get("files"))
    default = {"index": {"kind": "bm25"}} if has_files else {}
    return {**default, **values}


def load_recipe(values: dict[str, Any]) -> Recipe:
    """Builds the recipe of a config and removes the keys that it reads from `values`.

    It removes `system`, `recipe`, `credit`, `rollouts` and `grammar`, and reads `thinking` and the
    roles in `policies`; see `systems.ablation` for credit, rollouts, grammar and policies.
    """
    name, settings = values.pop("system", None), values.pop("recipe", {})
    credit = values.pop("credit", OWN)
    rollouts = convert(Natural, values.pop("rollouts", 0), "config.rollouts")
    grammar = str(values.pop("grammar", LOOSE))
    module = system_module(str(name))
    if missing := [part for part in ("Settings", "recipe") if not hasattr(module, part)]:
        raise UserError(
            f"config.system is {name!r}, but that module has no {missing[0]}: a system has a "
            "dataclass Settings and a function recipe(settings), as CONTRIBUTING.md shows"
        )
    # The settings of a recipe depend on the system, so that `build` cannot know their class.
    with own_code(f"config.system is {name!r}, whose recipe"):
        recipe = module.recipe(build(module.Settings, settings, "config.recipe"))
    if not isinstance(recipe, Recipe):
        raise UserError(
            f"config.system is {name!r}, whose recipe returned {recipe!r:.80}: return a Recipe"
        )
    for system in (recipe.system, recipe.evaluation_system):
        check_members(system)
    # Read before `build` converts the whole config: the recipe needs the names now.
    pairs = convert(tuple[tuple[str, str], ...], values.get("policies", ()), "config.policies")
    recipe = with_own_policies(recipe, [name for name, _ in pairs])
    if values.get("thinking") == "on":
        recipe = with_thinking(recipe)
    recipe = with_grammar(recipe, grammar)
    return with_credit(recipe, str(credit), rollouts)
