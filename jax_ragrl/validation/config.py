"""Checks of a config: every wrong key and value, of any config of the package."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any

from jax_ragrl.config.schema import problems
from jax_ragrl.errors import UserError
from jax_ragrl.run.config import Job, load_job, with_default_index
from jax_ragrl.systems.registry import system_module
from jax_ragrl.warmstart.demos import WarmStart, load_warm_start
from jax_ragrl.warmstart.finetune import Finetune, load_finetune
from jax_ragrl.warmstart.warmup import Warmup, load_warmup

# The keys that `load_recipe` reads, before the rest becomes a dataclass.
RECIPE_KEYS = ("system", "recipe", "credit", "rollouts", "grammar")
RUN = "run"


class ConfigKind(typing.NamedTuple):
    """A kind of config: its name, its dataclass, and the function that reads it."""

    name: str
    cls: type
    load: Callable[[Mapping[str, Any]], Any]


def kind_of(values: Mapping[str, Any]) -> ConfigKind:
    """Returns the kind of a config by the keys that only it has."""
    if "stages" in values:
        return ConfigKind("warmup", Warmup, load_warmup)
    if "examples" in values:
        return ConfigKind("finetune", Finetune, load_finetune)
    data = values.get("data")
    if isinstance(data, Mapping) and "demos" in data:
        return ConfigKind("demos", WarmStart, load_warm_start)
    return ConfigKind(RUN, Job, load_job)


def config_problems(values: Mapping[str, Any]) -> list[str]:
    """Returns a message per wrong key or value of a config, and of keys that contradict each other.

    Args:
      values: the nested values of a config of any command.
    """
    kind = kind_of(values)
    rest = dict(with_default_index(values)) if kind.name == RUN else dict(values)
    found = list[str]()
    if kind.name in (RUN, "warmup"):
        found = _recipe_problems(values)
        rest = {key: value for key, value in rest.items() if key not in RECIPE_KEYS}
    recipe = f"missing config key config.{RECIPE}:"
    # The recipe is built by the module of its system, not from the key of the same name.
    found += [text for text in problems(kind.cls, rest) if not text.startswith(recipe)]
    return found or _refusal(lambda: kind.load(values))


RECIPE = "recipe"


def _recipe_problems(values: Mapping[str, Any]) -> list[str]:
    try:
        module = system_module(str(values.get("system")))
    except UserError as error:
        return [str(error)]
    if not hasattr(module, "Settings"):
        return []  # `load_recipe` says what the module lacks
    return problems(module.Settings, values.get(RECIPE, {}), f"config.{RECIPE}")


def _refusal(load: Callable[[], Any]) -> list[str]:
    try:
        load()
    except UserError as error:
        return [str(error)]
    return []
