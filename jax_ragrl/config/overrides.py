"""A config file with `--config.a.b=VALUE` overrides, as a nested dict."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from jax_ragrl.errors import UserError


def load_config(default: pathlib.Path | None, arguments: Sequence[str]) -> dict[str, Any]:
    """A config file (`--config=FILE`, or `default`) with `--config.a.b=VALUE` overrides applied.

    A key that the file leaves to its default may be given as well; whether there is such a key is
    seen where the config is read, as for the file's own.
    """
    overrides = [a for a in arguments if a.startswith("--config.")]
    files = [a for a in arguments if a not in overrides]
    written = _read_config(default, files).to_dict()
    known = [a for a in overrides if _holds(written, _keys(a))]
    config = _read_config(default, [*files, *known]).to_dict()
    override(config, [a for a in overrides if a not in known])
    return config


def override(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Sets the keys of overrides, whether they are there or not."""
    for text in overrides:
        _add(config, _keys(text), _literal(text.partition("=")[2]))


def _read_config(
    default: pathlib.Path | None, arguments: Sequence[str]
) -> ml_collections.ConfigDict:
    """The config of a file, with overrides of keys that are in it."""
    named = [a.removeprefix("--config=") for a in arguments if a.startswith("--config=")]
    file = (named or [str(default or "")])[-1]
    if not file:
        raise UserError("no config: give --config=FILE, e.g. --config=configs/tiny/c3po.py")
    path = pathlib.Path(file.partition(":")[0])
    if not (path.is_file() and path.suffix == ".py"):
        why = "is no Python file" if path.is_file() else "does not exist"
        raise UserError(f"config {path} {why}: give one with a get_config(), --config=FILE.py")
    values, argv = flags.FlagValues(), ["ragrl", *arguments]
    try:
        config_flags.DEFINE_config_file(
            "config", file, flag_values=values, lock_config=True, sys_argv=argv
        )
        values(argv)
        config: Any = values.config
    except (flags.Error, AttributeError, LookupError, TypeError, ValueError, OSError) as error:
        raise UserError(f"config {file}: {' '.join(str(error).split())}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(f"config {file}: get_config() gives no ConfigDict of ml_collections")
    return config


def _keys(override: str) -> list[str]:
    """The keys of `--config.a.b=VALUE`, outermost first."""
    path, equals, _ = override.removeprefix("--config.").partition("=")
    if not (equals and path):
        raise UserError(f"{override} has no value: give --config.{path or 'KEY'}=VALUE")
    return path.split(".")


def _holds(values: Any, keys: Sequence[str]) -> bool:
    """Whether a nested mapping has a value under these keys; an index such as `a[0]` is its own."""
    first = keys[0].partition("[")[0]
    if not isinstance(values, dict) or first not in values:
        return False
    return len(keys) == 1 or _holds(values[first], keys[1:])


def _add(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise UserError(f"config key {key} is a value, and no section for {'.'.join(keys)}")
    values[keys[-1]] = value


def _literal(text: str) -> Any:
    """A value as Python or JSON writes it; other text is a string."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
