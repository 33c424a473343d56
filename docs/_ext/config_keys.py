"""Every key of the config files, read from the dataclasses that the package builds of them."""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax_ragrl.config.keys import (
    SECTIONS,
    default_text,
    descriptions,
    only_value,
    sections_in,
    sentences_about,
    type_name,
)
from jax_ragrl.config.schema import fields_of, is_section


class Key(NamedTuple):
    """One key of a config.

    Fields:
      name: dotted path, such as `objective.kl.coefficient`.
      type: the type as a reader would say it.
      default: the default as Python writes it; empty if the key is required.
      meaning: Markdown; empty if the code has no description.
      described: whether the meaning is the key's own, and not a sentence of its class.
      owner: the dataclass that holds the key, as `module.Class`.
    """

    name: str
    type: str
    default: str
    meaning: str
    described: bool
    owner: str


class Section(NamedTuple):
    """The keys below one dotted prefix, with the description of their dataclass."""

    prefix: str
    cls: type
    keys: tuple[Key, ...]


# --- the tables ----------------------------------------------------------------------------------


def sections(cls: Any, prefix: str = "", instance: Any = None) -> Iterator[Section]:
    """The section of a dataclass, then those below it, in order.

    Args:
      instance: the default of the whole section, if it has one; its values are the defaults.
    """
    keys, below = list[Key](), list[tuple[Any, str, Any]]()
    own, text = descriptions(cls), inspect.getdoc(cls) or ""
    for name, (hint, required, default) in fields_of(cls).items():
        if instance is not None:
            required, default = False, getattr(instance, name)
        path = f"{prefix}{name}"
        inner = sections_in(hint)
        below += [
            (c, f"{path}{after}.", default if type(default) is c else None) for after, c in inner
        ]
        shown = "" if inner and is_section(type(default)) else default_text(default, required)
        meaning = own.get(name, "") or only_value(hint)
        keys.append(
            Key(
                path,
                type_name(hint),
                shown,
                meaning or sentences_about(text, name),
                bool(meaning) or any(a == "" for a, _ in inner),
                f"{cls.__module__}.{cls.__qualname__}",
            )
        )
    yield Section(prefix.rstrip("."), cls, tuple(keys))
    for inner_cls, path, default in below:
        yield from sections(inner_cls, path, default)


def run_config() -> type:
    """The dataclass of a run's whole config."""
    job: type = importlib.import_module("jax_ragrl.run.config").Job
    return job


def systems() -> dict[str, Any]:
    """The modules of the systems, by their name in a config, and baselines that train."""
    from jax_ragrl.systems.registry import PAPERS, system_module

    baselines = ("executor", "rag_ddr", "tree_grpo")
    names = [*PAPERS, *(f"jax_ragrl.systems.baselines.{name}" for name in baselines)]
    return {name: system_module(name) for name in names}


def settings_of(module: Any) -> Any:
    """The dataclass of the section `recipe` of a system."""
    return module.Settings


# Keys that `load_recipe` takes out of a config before the dataclass is built.
RECIPE_KEYS = ("system", "recipe", "credit", "rollouts", "grammar")


@functools.cache
def groups() -> dict[str, list[Section]]:
    """All sections, by what reads them."""
    from jax_ragrl.warmstart.demos import load_warm_start
    from jax_ragrl.warmstart.finetune import load_finetune
    from jax_ragrl.warmstart.warmup import load_warmup

    job = run_config()
    run = [s for s in sections(job) if not s.prefix.startswith("recipe")]
    result = {"run": run}
    for name, module in systems().items():
        result[f"recipe:{name}"] = list(sections(settings_of(module), "recipe."))
    result["demos"] = list(sections(typing.get_type_hints(load_warm_start)["return"]))
    result["finetune"] = list(sections(typing.get_type_hints(load_finetune)["return"]))
    returned = typing.get_type_hints(load_warmup)["return"]
    result["warmup"] = list(sections(next(a for _, a in arguments_of(returned) if is_section(a))))
    return result


def arguments_of(hint: Any) -> list[tuple[int, Any]]:
    """The types within a tuple type, or the type itself."""
    return list(enumerate(typing.get_args(hint) or (hint,)))


def undescribed() -> list[str]:
    """The keys, as `Class.field`, that the code does not describe."""
    keys = (key for group in groups().values() for section in group for key in section.keys)
    return sorted({f"{k.owner}.{k.name.rpartition('.')[2]}" for k in keys if not k.described})


@functools.cache
def all_names() -> set[str]:
    """Every dotted key of every config."""
    names = {key.name for group in groups().values() for s in group for key in s.keys}
    return names | set(RECIPE_KEYS)


# --- Markdown ------------------------------------------------------------------------------------


TITLES = {
    "run": "A training run",
    "demos": "Supervised warm start: `ragrl warmup sft` with `data.demos`",
    "finetune": "Fine-tuning a reader: `ragrl warmup sft`",
    "warmup": "The tiny policy: `ragrl warmup tiny`",
}
PAGES = {"run": ("run",), "warm_start": ("demos", "finetune", "warmup")}


def markdown(page: str) -> str:
    """The text of a page (`run`, `recipes` or `warm_start`): one entry per key.

    The sections that are the same in several configs are described once, with the run's.
    """
    known = {section.cls for section in groups()["run"]} if page != "run" else set()
    parts = []
    for name, group in groups().items():
        if name not in PAGES.get(page, ()) and not (page == "recipes" and ":" in name):
            continue
        parts.append(f"## {TITLES.get(name) or title(name.partition(':')[2])}\n")
        seen: set[str] = set()
        parts += [text_of(s, name, group, seen) for s in group if s.cls not in known]
    return "\n".join(parts)


def title(system: str) -> str:
    """The heading of a recipe, short for a baseline's dotted name."""
    return f"`{system.rpartition('.')[2]}`"


def text_of(section: Section, group: str, others: list[Section], seen: set[str]) -> str:
    """The heading, introduction and keys of a section."""
    prefixes = {other.prefix for other in others}
    head = f"### `{section.prefix}`{kind_of(section)}\n" if section.prefix else ""
    own = [key for key in section.keys if key.name not in RECIPE_KEYS]
    keys = [entry(key, group, prefixes, seen) for key in own]
    return "\n".join([head, introduction(section.cls) + "\n", *keys])


def sentence(text: str) -> str:
    """Text with a capital, unless it begins with code, and a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


def kind_of(section: Section) -> str:
    """The values of `kind` that select a section, if it is one of several."""
    kinds = typing.get_args(typing.get_type_hints(section.cls).get("kind"))
    return f" of kind {' or '.join(f'`{kind}`' for kind in kinds)}" if kinds else ""


def introduction(cls: Any) -> str:
    """The docstring of a class without its section of fields."""
    text = inspect.getdoc(cls) or ""
    if text.startswith(f"{cls.__name__}("):  # what NamedTuple and dataclass write themselves
        return ""
    lines = []
    for line in text.splitlines():
        if SECTIONS.match(line):
            break
        lines.append(line)
    return "\n".join(lines).strip()


def entry(key: Key, group: str, prefixes: set[str], seen: set[str]) -> str:
    """One key as a directive, which gives it a link of its own.

    Args:
      group: what reads the key, see `groups`.
      prefixes: the sections of the group.
      seen: the targets so far; a key that several kinds of a section have is a target once.
    """
    after = f" = {key.default}" if key.default else ""
    target = key.name if group == "run" else f"{group.partition(':')[2] or group}:{key.name}"
    text = key.meaning
    inner = f"{key.name}[i]" if f"{key.name}[i]" in prefixes else key.name
    if key.name in prefixes or inner in prefixes:
        text = f"{text} The keys are listed under `{inner}`.".strip()
    text = sentence(text) or "*(no description in the code yet)*"
    required = "" if after or key.type.startswith("section") else " (required)"
    once = ":no-index:\n\n" if target in seen else ""
    seen.add(target)
    head = f":::{{config-key}} {target} | {key.name}: {key.type}{required}{after}"
    return f"{head}\n{once}{text}\n:::\n"
