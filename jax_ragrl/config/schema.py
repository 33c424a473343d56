"""Builds frozen dataclasses from the nested mapping of a config.

Every key of a config is a field of a dataclass. An unknown key is an error, so that no setting can
be silently ignored; a missing key without a default is an error too.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from jax_ragrl.config.ranges import ASCENDING, check_number
from jax_ragrl.errors import UserError, safe_line

T = TypeVar("T")


class Field(NamedTuple):
    """A field of a section.

    Fields:
      hint: its type, with annotations.
      is_required: whether it lacks a default.
      default: its default; None if it is required.
    """

    hint: Any
    is_required: bool
    default: Any


@functools.cache  # resolving annotations, which are strings in this package, is slow
def fields_of(cls: Any) -> Mapping[str, Field]:
    """Returns the fields of a dataclass or `NamedTuple` by name."""
    hints, missing = typing.get_type_hints(cls, include_extras=True), dataclasses.MISSING
    # A `NamedTuple` has no field objects, only a mapping of defaults.
    if not dataclasses.is_dataclass(cls):
        values = {name: cls._field_defaults.get(name, missing) for name in cls._fields}
    else:
        values = {
            f.name: f.default if f.default_factory is missing else f.default_factory()
            for f in dataclasses.fields(cls)
        }
    return {
        name: Field(hints[name], value is missing, None if value is missing else value)
        for name, value in values.items()
    }


def is_section(hint: Any) -> bool:
    """Whether a type is a section of keys: a dataclass or a `NamedTuple`."""
    return dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")


def members(hint: Any) -> list[Any]:
    """Returns the types of a union but None; another type alone."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return [hint]
    return [member for member in typing.get_args(hint) if member is not type(None)]


def kinds_of(hint: Any) -> dict[str, Any]:
    """Returns the dataclasses of a union by the values that their field `kind` may have."""
    sections = [member for member in members(hint) if is_section(member)]
    if len(sections) < 2:
        return {}
    return {
        kind: section
        for section in sections
        for kind in typing.get_args(fields_of(section)["kind"].hint)
    }


def section_class(hint: Any, value: Any) -> Any:
    """Returns the class of a section; None for other types and for an unknown `kind`."""
    if kinds := kinds_of(hint):
        default = next(iter(kinds))
        return kinds.get(str(value.get("kind", default)) if isinstance(value, Mapping) else default)
    return next((member for member in members(hint) if is_section(member)), None)


def build(cls: type[T], values: Mapping[str, Any], where: str = "config") -> T:
    """Builds an instance of a dataclass or `NamedTuple` from a (nested) mapping; see `convert`."""
    return typing.cast(T, convert(cls, values, where))


def problems(hint: Any, value: Any, where: str = "config") -> list[str]:
    """Returns a message per problem for which `convert` refuses a value."""
    try:
        convert(hint, value, where)
    except UserError as error:
        return [safe_line(text) for text in error.args]
    return []


def convert(hint: Any, value: Any, where: str) -> Any:
    """Converts a config value to the type of its field.

    Args:
      hint: the type: a dataclass or `NamedTuple`, tuple, mapping, `Literal`, number, string, an
        optional one of these, or a union of dataclasses that differ in `kind`. Annotations limit a
        number (`config.ranges`).
      value: the value as a Python config or a JSON file has it; a section may be built already.
      where: the dotted path of the value, for error messages.

    Raises:
      UserError: with a message per key that is unknown, missing, of the wrong type or out of its
        range, by its dotted path; if there is none, what the class itself refuses.
    """
    hint, *limits = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_section(hint):
        # A recipe is built by its system's module before the config is.
        return value if isinstance(value, hint) else _section(hint, value, where, {})
    if origin in (types.UnionType, typing.Union):
        return _member(hint, value, where)
    if origin is tuple:
        return _sequence(args, value, where, ASCENDING in limits)
    if origin is Mapping:
        _expect(isinstance(value, Mapping), where, value, "a section of keys")
        parts = [(args[1], part, f"{where}.{name}") for name, part in value.items()]
        return dict(zip(value, _convert_all(parts, []), strict=True))
    # The message names the key without "config.", as a file writes it.
    if origin is typing.Literal:
        one_of(where.removeprefix("config."), value, args)
    # A whole number is a valid float, but a bool is not a valid int.
    if hint is float and _is(value, int):
        value = float(value)
    if hint in (int, float, str, bool):
        unset = f" (set it with --{where}=VALUE)" if value is None else ""
        _expect(_is(value, hint), where, value, f"of type {hint.__name__}{unset}")
        if hint in (int, float):
            check_number(value, limits, where)
    return value


def _section(cls: Any, value: Any, where: str, kinds: Mapping[str, Any]) -> Any:
    _expect(isinstance(value, Mapping), where, value, "a section of keys")
    fields = fields_of(cls)
    found = [_unknown(cls, name, value[name], where, kinds) for name in value if name not in fields]
    # After the unknown keys: a misspelled key is both unknown and missing, and its name is the
    # cause.
    found += [
        f"missing config key {where}.{name}: set it with --{where}.{name}=VALUE"
        for name, field in fields.items()
        if field.is_required and name not in value
    ]
    names = [name for name in value if name in fields]
    parts = [(fields[name].hint, value[name], f"{where}.{name}") for name in names]
    return cls(**dict(zip(names, _convert_all(parts, found), strict=True)))


def _unknown(cls: Any, name: str, value: Any, where: str, kinds: Mapping[str, Any]) -> str:
    if readers := [kind for kind, other in kinds.items() if name in fields_of(other)]:
        own = next(kind for kind, other in kinds.items() if other is cls)
        return (
            f"config key {where}.{name} is {value!r}, but {where}.kind is {own!r}, and only kind "
            f"{' or '.join(readers)} reads this key: remove it, or change the kind"
        )
    valid = fields_of(cls)
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"did you mean {close[0]}?" if close else f"valid keys are {', '.join(valid)}"
    for kind, other in kinds.items():
        if more := [key for key in fields_of(other) if key not in valid]:
            hint += f"; of kind {kind}: {', '.join(more)}"
    return f"unknown config key {where}.{name}: {hint}"


def _member(union: Any, value: Any, where: str) -> Any:
    """Converts an optional value, or a section whose key `kind` selects its dataclass."""
    types_ = members(union)
    if value is None and type(None) in typing.get_args(union):
        return None
    if len(types_) == 1:
        return convert(types_[0], value, where)
    if isinstance(value, tuple(types_)):
        return value
    kinds = kinds_of(union)
    _expect(bool(kinds) and isinstance(value, Mapping), where, value, "a section of keys")
    kind = value.get("kind", next(iter(kinds)))
    one_of(f"{where.removeprefix('config.')}.kind", kind, list(kinds))
    return _section(kinds[kind], value, where, kinds)


def _sequence(args: tuple[Any, ...], value: Any, where: str, ascending: bool) -> tuple[Any, ...]:
    """A tuple of one type (`tuple[int, ...]`) or of fixed types (`tuple[int, str]`)."""
    _expect(isinstance(value, list | tuple), where, value, "a list or tuple")
    hints = args[:1] * len(value) if args[1:] == (...,) else args
    _expect(len(value) == len(hints), where, value, f"of length {len(hints)}")
    parts = [(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True))]
    result = tuple(_convert_all(parts, []))
    if ascending and not (result and list(result) == sorted(set(result))):
        raise UserError(f"{where} is {value}: list the numbers in ascending order, each once")
    return result


def _convert_all(parts: Iterable[tuple[Any, Any, str]], found: list[str]) -> list[Any]:
    """Converts values (type, value, path); raises their problems after those already found."""
    result = []
    for part in parts:
        try:
            result.append(convert(*part))
        except UserError as error:
            found += error.args
    if found:
        raise UserError(*found)
    return result


def _expect(right: bool, where: str, value: Any, kind: str) -> None:
    if not right:
        raise UserError(f"config key {where} is {value!r}: it must be {kind}")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def one_of(where: str, value: str, valid: Iterable[str]) -> None:
    """Raises `UserError` if a value, named `where` in the message, is not among the valid ones."""
    if value not in valid:
        raise UserError(f"{where} is {value!r}: use one of {', '.join(valid)}")


def is_http(address: str) -> bool:
    """Whether an address begins with `http://` or `https://`."""
    return address.startswith(("http://", "https://"))


def check_scheme(key: str, url: str) -> None:
    """Refuses an address that no client could ask, such as `localhost:8000`."""
    if not is_http(url):
        raise UserError(
            f"{key} is {url!r}, without http:// or https://: give the whole address, such as "
            f"http://{url}"
        )


def local(path: str | pathlib.Path) -> pathlib.Path:
    """Returns a path on this machine.

    Raises:
      UserError: the path is empty, or the address of a bucket, which `pathlib` would silently turn
        into the name of a local folder.
    """
    if not str(path):
        raise UserError("a path is empty: check whether a shell variable is unset")
    # One slash, because `pathlib` may have merged the two. One letter before the colon is a drive.
    if re.match(r"[a-z][a-z0-9]+:/", str(path)):
        raise UserError(
            f"{path} is not a path on this machine: mount the bucket as a folder (for gs:// with "
            "gcsfuse), and pass the path below that folder"
        )
    return pathlib.Path(path)
