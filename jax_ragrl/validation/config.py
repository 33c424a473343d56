"""Checks of a config: every wrong key and value, of any config of the package."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax_ragrl.config.keys import ConfigKey, config_keys
from jax_ragrl.config.schema import problems
from jax_ragrl.errors import UserError
from jax_ragrl.run.config import Job
from jax_ragrl.run.load import load_job, with_default_index
from jax_ragrl.systems.ablation import LOOSE, OWN
from jax_ragrl.systems.registry import system_module
from jax_ragrl.warmstart.demos import WarmStart, load_warm_start
from jax_ragrl.warmstart.finetune import Finetune, load_finetune
from jax_ragrl.warmstart.warmup import Warmup, load_warmup

RUN, RECIPE = "run", "recipe"
# The keys that `load_recipe` reads before the rest becomes a dataclass, and their descriptions.
RECIPE_KEYS = {
    "system": "the name of a system, or the dotted name of a module of one's own.",
    "recipe": "the settings of the system.",
    "credit": "the credit rule; `own` is that of the system, `module:function` one of your own.",
    "rollouts": "the number of rollouts per question; 0: that of the system.",
    "grammar": "`strict` masks all tokens that no valid action continues with; `loose` does not.",
}
RECIPE_DEFAULTS = {"credit": OWN, "rollouts": 0, "grammar": LOOSE}


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


def keys_of(values: Mapping[str, Any]) -> Iterator[ConfigKey]:
    """Yields all keys of a config of any command, those at their defaults included."""
    kind = kind_of(values)
    if kind.name in (RUN, "warmup"):
        for name, meaning in RECIPE_KEYS.items():
            if name == RECIPE:
                settings = system_module(str(values.get("system"))).Settings
                yield from config_keys(settings, values.get(RECIPE, {}), f"{RECIPE}.")
            else:
                default = RECIPE_DEFAULTS.get(name)
                words = "" if default is None else repr(default)
                word = "int" if isinstance(default, int) else "str"
                yield ConfigKey(name, values.get(name, default), words, word, meaning)
    for key in config_keys(kind.cls, values):
        if key.name != RECIPE:
            yield key


def config_problems(values: Mapping[str, Any]) -> list[str]:
    """Returns a message per wrong key or value, and per contradiction between keys."""
    kind = kind_of(values)
    rest = dict(with_default_index(values)) if kind.name == RUN else dict(values)
    findings = list[str]()
    if kind.name in (RUN, "warmup"):
        findings = _recipe_problems(values)
        rest = {key: value for key, value in rest.items() if key not in RECIPE_KEYS}
    recipe = f"missing config key config.{RECIPE}:"
    # The recipe is built by the module of its system, not from the key of the same name.
    findings += [text for text in problems(kind.cls, rest) if not text.startswith(recipe)]
    if findings:
        return findings
    try:
        kind.load(values)
    except UserError as error:
        return [str(error)]
    return []


def with_empty_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config whose texts that are still to be named (None) are empty, as in a plan."""
    named = copy.deepcopy(dict(values))
    for key in keys_of(values):
        *path, name = key.name.split(".")
        section: Any = named
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        # A section may be of a wrong type, which `config_problems` names.
        if isinstance(section, dict) and section.get(name, "") is None and key.type == "str":
            section[name] = ""
    return named


def _recipe_problems(values: Mapping[str, Any]) -> list[str]:
    try:
        module = system_module(str(values.get("system")))
    except UserError as error:
        return [str(error)]
    if not hasattr(module, "Settings"):
        return []  # `load_recipe` names the part that the module lacks
    return problems(module.Settings, values.get(RECIPE, {}), f"config.{RECIPE}")
