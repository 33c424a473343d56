"""Reads a config file and applies `--config.a.b=VALUE` overrides, as a nested dict."""

from __future__ import annotations

import ast
import pathlib
import runpy
import types
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from jax_ragrl.config.functions import own_prints, raised
from jax_ragrl.config.schema import fields_of, kinds_of
from jax_ragrl.config.shipped_configs import config_path, nearest_config
from jax_ragrl.errors import UserError
from jax_ragrl.llm.kinds import LLM
from jax_ragrl.retrieval.kinds import Index

PREFIX = "--config."
SECTIONS: Mapping[str, Any] = {"index": Index, "llm": LLM, "judge": LLM, "writer": LLM}


def load_config(default: pathlib.Path | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the nested values of a config file, or `default`, with overrides.

    `arguments` are `--config=FILE[:ARGUMENT]` and `--config.a.b=VALUE`, also of keys that the file
    leaves at their default. Whether a key exists is checked when dataclasses are built.
    """
    # 1. Execute the file, to know which keys it has.
    overrides = [a for a in arguments if a.startswith(PREFIX)]
    file = _config_file(default, [a for a in arguments if a not in overrides])
    values = _execute(file)
    # 2. Keys of the file get their type from its value; the others are parsed as literals.
    # As with any flag, the last one of a key counts: absl would join the items of repeated lists.
    changes = [*{".".join(_keys(text)): text for text in overrides}.values()]
    existing = [a for a in changes if _holds(values.to_dict(), _keys(a))]
    config = _parsed(file, values, existing).to_dict()
    # 3. Add the overrides of keys that the file leaves at their default.
    override(config, overrides, [a for a in changes if a not in existing])
    return config


def override(
    config: dict[str, Any], overrides: Sequence[str], missing: Sequence[str] | None = None
) -> None:
    """Sets keys of a config in place (`--config.a.b=VALUE`), or those of `missing` alone.

    Keys of a kind that the overrides have replaced are dropped.
    """
    for text in overrides if missing is None else missing:
        _add(config, _keys(text), _literal(text.partition("=")[2]))
    paths = [_keys(text) for text in overrides]
    for name, union in SECTIONS.items():
        section, kinds = config.get(name), kinds_of(union)
        # The keys of a file mean nothing once the command line selects another kind. An unknown
        # kind, and an override that the kind does not read, are reported by `schema.convert`.
        if not isinstance(section, dict) or [name, "kind"] not in paths:
            continue
        if own := kinds.get(str(section["kind"])):
            others = {key for kind in kinds.values() for key in fields_of(kind)}
            given = {path[1] for path in paths if path[0] == name and path[1:]}
            for key in others - fields_of(own).keys() - given:
                section.pop(key, None)


def _execute(file: str) -> ml_collections.ConfigDict:
    """Returns what `get_config` of a config file returns; `file` is as of `_config_file`."""
    name, *argument = file.split(":", 1)
    try:
        module = types.ModuleType(name)  # for the message without a get_config
        with own_prints():
            vars(module).update(runpy.run_path(name, run_name=name))
            config = module.get_config(*argument)
    except ImportError as error:
        raise UserError(
            f"config {file}: {error}: PYTHONPATH must include the folder of a module, also if that "
            "is the folder of the config"
        ) from error
    except UserError:
        raise
    except Exception as error:
        reason = raised(error)
        if argument and isinstance(error, KeyError):
            reason = f"get_config() has no {error}: change the text after the colon"
        raise UserError(f"config {file}: {reason}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(
            f"config {file}: get_config() returns {type(config).__name__}: return a ConfigDict of "
            "ml_collections"
        )
    return config


def _parsed(
    file: str, values: ml_collections.ConfigDict, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
    """Returns the values of a file with overrides of keys that it has."""
    # Separate flags, because absl's global ones accept the name "config" only once per process.
    found, argv = flags.FlagValues(), ["ragrl", *overrides]
    try:
        config_flags.DEFINE_config_dict("config", values, flag_values=found, sys_argv=argv)
        found(argv)
    except (flags.Error, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"config {file}: {' '.join(str(error).split())}") from error
    return found.config


def _config_file(default: pathlib.Path | None, arguments: Sequence[str]) -> str:
    """The path of the config file, with a colon and an argument of its `get_config` if any."""
    files = [a.removeprefix("--config=") for a in arguments if a.startswith("--config=")]
    file = (files or [str(default or "")])[-1]
    if not file:
        raise UserError("no config: give --config=FILE, e.g. --config=configs/tiny/c3po.py")
    name, colon, argument = file.partition(":")
    path = config_path(name)
    if not (path.is_file() and path.suffix == ".py"):
        why = "is not a Python file" if path.is_file() else "does not exist"
        near = nearest_config(name)
        remedy = (
            f"did you mean {near}?" if near else "give one with a get_config(), --config=FILE.py"
        )
        raise UserError(f"config {path} {why}: {remedy}")
    return f"{path}{colon}{argument}"


def _keys(text: str) -> list[str]:
    path, equals, _ = text.removeprefix(PREFIX).partition("=")
    if not (equals and path):
        raise UserError(f"{text} has no value: give --config.{path or 'KEY'}=VALUE")
    return path.split(".")


def _holds(values: Any, keys: Sequence[str]) -> bool:
    """Whether nested values contain these keys; an index such as `a[0]` refers to `a`."""
    first = keys[0].partition("[")[0]
    if not isinstance(values, dict) or first not in values:
        return False
    return len(keys) == 1 or _holds(values[first], keys[1:])


def _add(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        # Without this check, an override below a number would fail as a TypeError.
        if not isinstance(values, dict):
            raise UserError(f"config key {key} is a value, and no section for {'.'.join(keys)}")
    values[keys[-1]] = value


def _literal(text: str) -> Any:
    # The booleans of JSON; `literal_eval` reads Python's spelling only.
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):  # a list as the key of a mapping
        return text
