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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from jax_ragrl.config.ranges import check_range
from jax_ragrl.errors import UserError

T = TypeVar("T")


def _hints(cls: Any) -> dict[str, Any]:
    """The types of the fields of a class, resolved: annotations are strings in this package."""
    return _cached_hints(cls)


_cached_hints = functools.cache(typing.get_type_hints)  # resolving them is slow


def build(cls: type[T], values: Mapping[str, Any], where: str = "config") -> T:
    """Builds an instance of a dataclass or `NamedTuple` from a (nested) mapping.

    Args:
      cls: the class of the result; the types of its fields select how values are converted.
      values: field names and values; a nested dataclass is a nested mapping.
      where: the dotted path of `values` within the config, for error messages.

    Raises:
      UserError: a key is unknown, a required key is missing, or a value has the wrong type or is
        not in its range (`config.ranges`). The message names the key by its dotted path.
    """
    for problem in _wrong_keys(cls, values, where):
        raise UserError(problem)
    hints = _hints(cls)
    fields = {name: convert(hints[name], values[name], f"{where}.{name}") for name in values}

    def check_ranges() -> None:
        for name, value in fields.items():
            check_range(cls, name, value, f"{where}.{name}")

    # After the checks of the class, whose messages say more.
    try:
        result = cls(**fields)
    except ArithmeticError:  # these checks may divide by a number that is out of range
        check_ranges()
        raise
    check_ranges()
    return result


def _wrong_keys(
    cls: type, values: Mapping[str, Any], where: str, kinds: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yields a message per unknown key, then per missing one.

    Args:
      cls: the dataclass of the section.
      values: the keys of the section.
      where: the dotted path of the section.
      kinds: the dataclasses of the section by kind, if it has kinds.
    """
    is_required = _required(cls)
    others = {
        kind: [name for name in _required(member) if name not in is_required]
        for kind, member in (kinds or {}).items()
    }
    of_others = "".join(
        f"; of kind {kind}: {', '.join(own)}" for kind, own in others.items() if own
    )
    for name in values:
        if name not in is_required:
            hint = f"{_suggest(name, list(is_required))}{of_others}"
            yield f"unknown config key {where}.{name}: {hint}"
    # After the unknown keys: a misspelled key is both unknown and missing, and its name is the
    # cause.
    for name in is_required:
        if is_required[name] and name not in values:
            yield f"missing config key {where}.{name}: set it with --{where}.{name}=VALUE"


def problems(hint: Any, value: Any, where: str = "config") -> list[str]:
    """Returns the messages of everything that `convert` would refuse, and not of the first alone.

    Args:
      hint: the type, see `convert`.
      value: the value as a config has it.
      where: the dotted path of the value.
    """
    cls = section_class(hint, value)
    if cls is None or not isinstance(value, Mapping):
        return _refusal(lambda: convert(hint, value, where))
    hints, unread = _hints(cls), dict[str, str]()
    if kinds := kinds_in(hint):
        unread = _unread(kinds, value.get("kind", next(iter(kinds))), value, where)
    known = {name: value[name] for name in value if name not in unread}
    found = [*unread.values(), *_wrong_keys(cls, known, where, kinds)]
    for name in (name for name in value if name in hints):
        inner = problems(hints[name], value[name], f"{where}.{name}")
        path = f"{where}.{name}"
        found += inner or _refusal(functools.partial(check_range, cls, name, value[name], path))
    # What only the whole section shows: two keys that contradict each other.
    return found or _refusal(lambda: convert(hint, value, where))


def _refusal(action: Callable[[], Any]) -> list[str]:
    """Calls a function and returns the message of its `UserError`, or nothing."""
    try:
        action()
    except UserError as error:
        return [str(error)]
    return []


def section_class(hint: Any, value: Any) -> type | None:
    """Returns the dataclass of a section; None for other types and for an unknown `kind`."""
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return typing.cast(type, hint)
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return None
    members = _members(hint)
    if len(members) == 1:
        return section_class(members[0], value)
    kinds = kinds_in(hint)
    kind = value.get("kind", next(iter(kinds), "")) if isinstance(value, Mapping) else ""
    return kinds.get(str(kind))


def _members(hint: Any) -> list[Any]:
    """Returns the types of a union but None; nothing for another type."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return []
    return [member for member in typing.get_args(hint) if member is not type(None)]


def kinds_in(hint: Any) -> dict[str, Any]:
    """Returns the dataclasses of a union of sections by kind; nothing for another type."""
    members = _members(hint)
    is_kinds = len(members) > 1 and all(map(dataclasses.is_dataclass, members))
    return kinds_of(hint) if is_kinds else {}


def convert(hint: Any, value: Any, where: str) -> Any:
    """Converts a config value to the type of its field.

    Args:
      hint: the type: a dataclass, tuple, mapping, `Literal`, number, string, an optional one of
        these, or a union of dataclasses that differ in `kind`.
      value: the value as a Python config or a JSON file has it.
      where: the dotted path of the value, for error messages.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return _section(typing.cast(type, hint), value, where)
    if origin is tuple:
        return _sequence(args, value, where)
    if origin is Mapping:
        _expect(isinstance(value, Mapping), where, value, "a section of keys")
    # The message names the key without "config.", as a file writes it.
    if origin is typing.Literal:
        one_of(where.removeprefix("config."), value, args)
    if origin in (types.UnionType, typing.Union):
        return _union([a for a in args if a is not type(None)], value, where)
    # A whole number is a valid float, but a bool is not a valid int.
    if hint is float and _is(value, int):
        return float(value)
    if hint in (int, float, str, bool):
        unset = f" (set it with --{where}=VALUE)" if value is None else ""
        _expect(_is(value, hint), where, value, f"of type {hint.__name__}{unset}")
    return value


def kinds_of(union: Any) -> dict[str, Any]:
    """Returns the dataclasses of a union by the values that their field `kind` may have."""
    return {
        kind: member
        for member in typing.get_args(union)
        if dataclasses.is_dataclass(member)
        for kind in typing.get_args(_hints(member)["kind"])
    }


def _section(cls: type, value: Any, where: str) -> Any:
    # A recipe is built by its system's module before the config is.
    if isinstance(value, cls):
        return value
    _expect(isinstance(value, Mapping), where, value, "a section of keys")
    return build(cls, value, where)


def _union(members: list[Any], value: Any, where: str) -> Any:
    """Converts an optional value, or a section whose key `kind` selects its dataclass."""
    if len(members) == 1:
        return None if value is None else convert(members[0], value, where)
    if isinstance(value, tuple(members)):
        return value
    _expect(isinstance(value, Mapping), where, value, "a section of keys")
    # The union without None, if the section is optional.
    kinds = kinds_of(typing.Union[tuple(members)])  # noqa: UP007 (the members are not static)
    kind = value.get("kind", next(iter(kinds)))
    one_of(f"{where.removeprefix('config.')}.kind", kind, kinds)
    unread = _unread(kinds, kind, value, where)
    for problem in [*unread.values(), *_wrong_keys(kinds[kind], value, where, kinds)]:
        raise UserError(problem)
    return build(kinds[kind], value, where)


def _unread(
    kinds: Mapping[str, Any], kind: str, values: Mapping[str, Any], where: str
) -> dict[str, str]:
    """Returns a message per key of a section that another kind reads, and its own does not.

    Args:
      kinds: the dataclasses of the section by kind.
      kind: that of the section.
      values: the keys of the section.
      where: the dotted path of the section.
    """
    messages = dict[str, str]()
    for name in values:
        readers = [k for k, member in kinds.items() if name in _required(member)]
        if readers and kind not in readers:
            messages[name] = (
                f"config key {where}.{name} is {values[name]!r}, but {where}.kind is {kind!r}, and "
                f"only kind {' or '.join(readers)} reads this key: remove it, or change the kind"
            )
    return messages


def _required(cls: Any) -> dict[str, bool]:
    """The fields of a dataclass or `NamedTuple`, and whether each lacks a default."""
    # A `NamedTuple` has no field objects, only a mapping of defaults.
    if not dataclasses.is_dataclass(cls):
        return {name: name not in cls._field_defaults for name in cls._fields}
    nothing = dataclasses.MISSING
    return {
        f.name: f.default is nothing and f.default_factory is nothing
        for f in dataclasses.fields(cls)
    }


def _sequence(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    """A tuple of one type (`tuple[int, ...]`) or of fixed types (`tuple[int, str]`)."""
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
    # In Python, True is an int.
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _suggest(name: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean {close[0]}?" if close else f"valid keys are {', '.join(valid)}"


def one_of(where: str, value: str, valid: Iterable[str]) -> None:
    """Raises `UserError` if a value is not among the valid ones.

    Args:
      where: the name of the value in the message, such as a dotted config key.
      value: the value to check.
      valid: all values that are allowed.
    """
    if value not in valid:
        raise UserError(f"{where} is {value!r}: use one of {', '.join(valid)}")


def is_http(address: str) -> bool:
    """Whether an address begins with `http://` or `https://`."""
    return address.startswith(("http://", "https://"))


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
