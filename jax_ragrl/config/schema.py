"""Builds frozen dataclasses from an `ml_collections.ConfigDict`.

No other module reads a `ConfigDict`. A key that no dataclass has is an error, so that no key can be
ignored; a missing key without a default is an error too.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from jax_ragrl.errors import UserError

T = TypeVar("T")


def build(cls: type[T], values: Mapping[str, Any], where: str = "config") -> T:
    """An instance of the dataclass or `NamedTuple` `cls` from a (nested) mapping.

    Raises `UserError` for a key that `cls` does not have, a required key that is missing, and a
    value of the wrong kind; the message names the key by its dotted path.
    """
    required, hints = _keys(cls), typing.get_type_hints(cls)
    for name in values:
        if name not in required:
            raise UserError(f"unknown config key {where}.{name}: {_suggest(name, list(required))}")
    missing = [name for name in required if required[name] and name not in values]
    if missing:
        raise UserError(f"missing config key {where}.{missing[0]}")
    made = {name: convert(hints[name], values[name], f"{where}.{name}") for name in values}
    return cls(**made)


def convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint` asks for: nested dataclasses, tuples, mappings and numbers."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        if isinstance(value, typing.cast(type, hint)):
            return value
        _expect(isinstance(value, Mapping), where, value, "a section of keys")
        return build(typing.cast(type, hint), value, where)
    if origin is tuple:
        return _sequence(args, value, where)
    if origin is Mapping:
        _expect(isinstance(value, Mapping), where, value, "a section of keys")
    if origin in (types.UnionType, typing.Union):
        some = [a for a in args if a is not type(None)]
        return None if value is None else convert(some[0], value, where)
    if hint is float and _is(value, int):
        return float(value)
    if hint in (int, float, str, bool):
        unset = f" (set it with --{where}=VALUE)" if value is None else ""
        _expect(_is(value, hint), where, value, f"of type {hint.__name__}{unset}")
    return value


def _keys(cls: Any) -> dict[str, bool]:
    """The keys of a dataclass or `NamedTuple`, and whether each has to be given."""
    if not dataclasses.is_dataclass(cls):
        return {name: name not in cls._field_defaults for name in cls._fields}
    nothing = dataclasses.MISSING
    return {
        f.name: f.default is nothing and f.default_factory is nothing
        for f in dataclasses.fields(cls)
    }


def _sequence(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    """A tuple of one type (`tuple[int, ...]`) or of a fixed form (`tuple[int, str]`)."""
    _expect(isinstance(value, list | tuple), where, value, "a list or tuple")
    if len(args) == 2 and args[1] is ...:
        return tuple(convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    _expect(len(value) == len(args), where, value, f"of length {len(args)}")
    return tuple(
        convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True))
    )


def _expect(right: bool, where: str, value: Any, kind: str) -> None:
    if not right:
        raise UserError(f"config key {where} is {value!r}: it must be {kind}")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys are {', '.join(known)}"


def one_of(where: str, value: str, known: Iterable[str]) -> None:
    """`UserError` where a value is none of those that are known."""
    if value not in known:
        raise UserError(f"{where} is {value!r}: use one of {', '.join(known)}")


def local(path: str | pathlib.Path) -> pathlib.Path:
    """A path of this machine.

    Raises `UserError` for none at all, and for the address of a bucket, which `pathlib` would make
    a folder of.
    """
    if not str(path):
        raise UserError("a path is empty: is a variable of the shell not set?")
    if re.match(r"[a-z][a-z0-9]+:/", str(path)):
        raise UserError(
            f"{path} is no path of this machine: mount the bucket, as a folder (for gs:// with "
            "gcsfuse), and give the path below that"
        )
    return pathlib.Path(path)
