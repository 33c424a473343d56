"""Descriptions of config keys, from the dataclasses that a config becomes.

The reference of the documentation and `ragrl config show` use them.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax_ragrl.config.schema import fields_of, is_section, kinds_of, members, section_class

SECTIONS = re.compile(r"^\s*(Fields|Args|Attributes):\s*$")
ENTRY = re.compile(r"^(\s+)([\w, `]+?)\s*(?:\([^)]*\))?:\s+(.*)$")


class ConfigKey(NamedTuple):
    """One key of a config with its value.

    Fields:
      name: dotted path, such as `objective.kl.coefficient`.
      value: as the config has it, or else the default.
      default: the default as Python writes it; empty if the key is required.
      type: the type in words.
      meaning: its description.
    """

    name: str
    value: Any
    default: str
    type: str
    meaning: str


def config_keys(
    cls: Any, values: Mapping[str, Any], prefix: str = "", instance: Any = None
) -> Iterator[ConfigKey]:
    """Yields the keys of a config and of its sections, in the order of their dataclasses.

    Args:
      cls: the dataclass of the config.
      values: the nested values of the config.
      prefix: the dotted path of the config within a larger one, with a dot at its end.
      instance: the default of the whole section, if it has one; its values are the defaults.
    """
    meanings, text = descriptions(cls), inspect.getdoc(cls) or ""
    for name, (hint, is_required, default) in fields_of(cls).items():
        # The default of a whole section makes every key of it optional.
        if instance is not None:
            is_required, default = False, getattr(instance, name)
        value = values.get(name, None if is_required else default)
        if (inner := section_class(hint, value)) is not None and value is not None:
            section = value if isinstance(value, Mapping) else {}
            own = default if type(default) is inner else None
            kinds = kinds_of(hint)
            for key in config_keys(inner, section, f"{prefix}{name}.", own):
                if len(kinds) > 1 and key.name == f"{prefix}{name}.kind":
                    more = f" Each kind has its own keys: --config.{key.name}=KIND shows them."
                    words = " or ".join(map(repr, kinds))
                    key = key._replace(type=words, meaning=key.meaning + more)
                yield key
            continue
        meaning = meanings.get(name, "") or only_value(hint) or sentences_about(text, name)
        default_words = default_text(default, is_required)
        yield ConfigKey(f"{prefix}{name}", value, default_words, type_name(hint), meaning)


def descriptions(cls: Any) -> dict[str, str]:
    """Returns the own description of each field: an entry of the docstring."""
    result: dict[str, str] = {}
    # Subclasses last, so that their description of a field counts.
    for base in reversed(cls.__mro__[:-1]):
        if not base.__module__.startswith(("builtins", "typing")):
            result |= entries(inspect.getdoc(base) or "")
    return result


def entries(docstring: str) -> dict[str, str]:
    """Returns the `name: text` entries of the section Fields, Args or Attributes of a docstring."""
    result: dict[str, str] = {}
    names: list[str] = []
    depth, in_section = 0, False
    for line in docstring.splitlines():
        if SECTIONS.match(line):
            in_section, depth, names = True, 0, []
        # Text without indentation ends the section.
        elif in_section and line.strip() and not line.startswith(" "):
            in_section = False
        # A deeper line continues an entry, even if it has a colon.
        elif in_section and (match := ENTRY.match(line)) and depth in (0, len(match[1])):
            depth, names = len(match[1]), [n.strip(" `") for n in match[2].split(",")]
            result |= {name: match[3].strip() for name in names}
        elif in_section and line.strip():
            result |= {name: f"{result[name]} {line.strip()}" for name in names}
    return result


def sentences_about(docstring: str, name: str) -> str:
    """Returns the sentences of a docstring that mention a field in backticks."""
    text = " ".join(docstring.split())
    matches = [s for s in re.split(r"(?<=[.])\s+(?=[A-Z`])", text) if f"`{name}`" in s]
    return " ".join(matches)


def sections_in(hint: Any) -> list[tuple[str, type]]:
    """Returns the dataclasses that a type holds, each with the text after the key's name."""
    if is_section(hint):
        return [("", hint)]
    args, options = typing.get_args(hint), members(hint)
    if typing.get_origin(hint) is tuple and args[1:] == (...,):
        return [(f"[i]{after}", cls) for after, cls in sections_in(args[0])]
    return [] if options == [hint] else [pair for each in options for pair in sections_in(each)]


def type_name(hint: Any) -> str:
    """Returns a type in words, without the range of a number."""
    if typing.get_origin(hint) is typing.Annotated:
        return type_name(typing.get_args(hint)[0])
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        names = list(dict.fromkeys(type_name(a) for a in args if a is not type(None)))
        return " or ".join(names) + (" or None" if type(None) in args else "")
    if origin is typing.Literal:
        return " or ".join(repr(a) for a in args)
    if origin is tuple:
        if len(args) == 2 and args[1] is ...:
            return f"tuple of {type_name(args[0])}"
        return f"({', '.join(type_name(a) for a in args)})"
    if origin is not None and issubclass(origin, Mapping):
        return "mapping"
    if is_section(hint):
        return "section"
    return getattr(hint, "__name__", str(hint).removeprefix("typing."))


def default_text(value: Any, is_required: bool) -> str:
    """Returns a default as a config writes it; empty if the key is required."""
    if is_required:
        return ""
    return repr(value) if not isinstance(value, Mapping) else repr(dict(value))


def only_value(hint: Any) -> str:
    """Returns the description of a key that has one value only: the kind of its section."""
    values = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    return f"Selects this kind of section: `{values[0]}`." if len(values) == 1 else ""
