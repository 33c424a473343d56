"""Values as bytes, for messages between processes and for checkpoints: JSON of known types.

Nothing that the bytes say is imported, looked up or called. A reader builds plain values, NumPy
arrays and records: dataclasses, named tuples and enums that the reading program has declared, such
as the states of its systems. It sets their fields, after it has compared each value with the
annotation of its field.

The JSON text is one list. Each entry is a value, whose parts are numbers of earlier entries:

    ["Ann", "born in Ulm", ["jax_ragrl.types.Passage", 0, 0, 1], ["tuple", 2, 2]]

So a value that occurs often (a passage, the state of many nodes) is written once, a reader needs no
recursion, and no value can contain itself. The last entry is the whole.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import sys
import types
import typing
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jax_ragrl.errors import UserError

C = TypeVar("C")

PLAIN = (type(None), bool, int, float, str)
CONTAINERS: dict[str, type] = {
    kind.__name__: kind
    for kind in (tuple, list, set, frozenset, dict, collections.OrderedDict, collections.Counter)
}
# What a column of a table may hold, from and to text.
TEXTS: dict[str, Any] = {
    kind.__name__: (kind.isoformat, kind.fromisoformat)
    for kind in (datetime.date, datetime.datetime, datetime.time)
} | {"Decimal": (str, decimal.Decimal)}
NUMBERS, BYTES, ARRAY, SCALAR = "numbers", "bytes", "array", "scalar"
ARRAY_KINDS = "biufcSU"  # of `dtype.kind`: booleans, numbers and texts, no objects

_declared: list[Any] = []


def declare(kind: C, *kinds: Any) -> C:
    """Declares types of which values may be written and read; also a decorator of a class.

    A class is declared with its subclasses, and with the dataclasses, named tuples and enums that
    the annotations of their fields name. Returns `kind`.
    """
    _declared.extend((kind, *kinds))
    return kind


def dumps(value: Any) -> bytes:
    """Returns the bytes of a value; `UserError` if a part of it has no declared type."""
    writer = _Writer()
    try:
        writer.add(value)
        return zlib.compress(json.dumps(writer.entries).encode(), 1)
    except RecursionError:
        raise UserError(
            "a value for another process or a checkpoint is nested too deep, or contains itself: "
            "keep notes of a system flat"
        ) from None


def loads(data: bytes) -> Any:
    """Returns the value that `dumps` wrote; `UserError` for other bytes, or undeclared classes."""
    known, values = known_classes(), list[Any]()
    try:
        for entry in json.loads(zlib.decompress(data)):
            values.append(_value(entry, values, known))
        return values[-1]
    except UserError:
        raise
    except Exception as error:  # whatever is wrong with bytes of others
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"a message of a process, or a checkpoint's rollouts, cannot be read ({reason}): they "
            "are damaged, or another version of jax_ragrl wrote them; use that version"
        ) from error


# --- Writing --------------------------------------------------------------------------------------


class _Writer:
    """Appends values to `entries`, each one once."""

    def __init__(self) -> None:
        self.known, self.entries = known_classes(), list[Any]()
        self._numbers: dict[Any, int] = {}

    def add(self, value: Any) -> int:
        """Returns the number of the entry of a value."""
        kind = type(value)
        # By identity, for equal floats may have different signs; equal texts are often copies.
        key = (kind, value) if kind in (str, int, bool) else id(value)
        if key not in self._numbers:
            entry = value if kind in PLAIN else self._entry(value)
            self._numbers[key] = len(self.entries)
            self.entries.append(entry)
        return self._numbers[key]

    def _entry(self, value: Any) -> list[Any]:
        kind = type(value)
        name = kind.__name__
        if CONTAINERS.get(name) is kind:
            # Ids and log-probabilities of tokens: an entry for each would be slow.
            if kind is tuple and value and set(map(type, value)) <= {int, float}:
                return [NUMBERS, value]
            is_mapping = isinstance(value, Mapping)
            parts = [x for pair in value.items() for x in pair] if is_mapping else value
            return [name, *map(self.add, parts)]
        if kind is bytes:
            return [BYTES, base64.b64encode(value).decode()]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in ARRAY_KINDS:
            tag = ARRAY if kind is np.ndarray else SCALAR
            content = base64.b64encode(value.tobytes()).decode()
            return [tag, value.dtype.str, list(value.shape), content]
        if name in TEXTS and kind.__module__ in ("datetime", "decimal"):
            return [name, TEXTS[name][0](value)]
        if self.known.get(full_name(kind)) is not kind:
            raise UserError(
                f"a rollout holds {full_name(kind)}, which other processes and resumed runs cannot "
                "read: use built-in types, or decorate the dataclass, named tuple or enum with "
                "jax_ragrl.runtime.records.declare"
            )
        if dataclasses.is_dataclass(kind):
            parts = [getattr(value, field) for field in fields_of(kind)]
        else:
            parts = [value.name] if isinstance(value, enum.Enum) else value.__getnewargs__()
        return [full_name(kind), *map(self.add, parts)]


# --- Reading --------------------------------------------------------------------------------------


def _value(entry: Any, values: Sequence[Any], known: Mapping[str, type]) -> Any:
    if isinstance(entry, PLAIN):
        return entry
    name, *content = entry
    if name == NUMBERS:
        _require(set(map(type, content[0])) <= {int, float}, "numbers of another type")
        return tuple(content[0])
    if name == BYTES:
        return base64.b64decode(content[0], validate=True)
    if name in (ARRAY, SCALAR):
        dtype, shape, data = np.dtype(content[0]), content[1], base64.b64decode(content[2])
        _require(dtype.kind in ARRAY_KINDS, f"an array of {dtype}")
        array = np.ndarray(shape, dtype, bytearray(data))
        _require(array.nbytes == len(data), "an array of another size")
        return array if name == ARRAY else array[()]
    if name in TEXTS:
        return TEXTS[name][1](content[0])
    _require(all(type(i) is int and i >= 0 for i in content), "a negative number of an entry")
    parts = [values[i] for i in content]
    if name in CONTAINERS:
        kind = CONTAINERS[name]
        is_mapping = issubclass(kind, dict)
        # Hashing nested tuples that share their parts would take exponential time.
        if not issubclass(kind, tuple | list):
            _require(all(map(_is_key, parts[:: 1 + is_mapping])), "a key that is not plain")
        return kind(dict(zip(parts[::2], parts[1::2], strict=True)) if is_mapping else parts)
    if name not in known:
        raise UserError(
            f"a message of a process, or a checkpoint's rollouts, hold {name}, which this program "
            "does not declare: use the program and the system that wrote them, and resume "
            "no run folder of someone whom you do not trust"
        )
    return _record(known[name], parts)


def _require(is_true: bool, fault: str) -> None:
    if not is_true:
        raise ValueError(fault)


def _is_key(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(x, (*PLAIN, bytes, enum.Enum, np.generic)) for x in parts)


def _record(cls: Any, parts: Sequence[Any]) -> Any:
    if issubclass(cls, enum.Enum):
        return cls[parts[0]]
    hints = fields_of(cls)
    for (field, hint), part in zip(hints.items(), parts, strict=True):
        if not fits(part, hint):
            raise UserError(
                f"the field {field!r} of {full_name(cls)} holds a {type(part).__name__}, but its "
                f"annotation is {hint}: annotate the field with the type that it holds, so that "
                "other processes and resumed runs can read it"
            )
    if hasattr(cls, "_fields"):
        return cls(*parts)
    # As it was: `__init__` would compute some fields again.
    value = object.__new__(cls)
    for field, part in zip(hints, parts, strict=True):
        object.__setattr__(value, field, part)
    return value


# --- Types ----------------------------------------------------------------------------------------


def full_name(cls: type) -> str:
    """Returns the name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def known_classes() -> dict[str, type]:
    """Returns the classes of records that are declared in this process, by full name."""
    queue = [cls for hint in _declared for cls in _classes_in(hint)]
    seen = dict.fromkeys(queue)
    for cls in queue:
        hints = fields_of(cls).values() if _is_record(cls) else ()
        named = [c for hint in hints for c in _classes_in(hint) if _is_record(c)]
        new = [c for c in (*cls.__subclasses__(), *named) if c not in seen]
        queue += dict.fromkeys(new)
        seen |= dict.fromkeys(new)
    # Of two classes of one name, as after a cell of a notebook was run again, the newer one.
    return {full_name(cls): cls for cls in seen if _is_record(cls)}


def _is_record(cls: type) -> bool:
    is_enum = issubclass(cls, enum.Enum) and len(cls) > 0
    return dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or is_enum


def _classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes_in(part)


@functools.cache
def fields_of(cls: type) -> dict[str, Any]:
    """Returns the annotations of the fields of a record by name; `Any` if one has no meaning here.

    Annotations of local classes, and of names that are imported for type checkers alone, have none.
    """
    names: Iterable[str] = getattr(cls, "_fields", ())
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    hints = dict[str, Any]()
    for name in names:
        base = next((b for b in cls.__mro__ if name in vars(b).get("__annotations__", ())), cls)
        own = {name: vars(base).get("__annotations__", {}).get(name, Any)}
        place = vars(sys.modules.get(base.__module__, types))
        try:
            holder = types.SimpleNamespace(__annotations__=own)
            hints |= typing.get_type_hints(holder, place, dict(vars(base)))
        except Exception:  # an annotation is any expression
            hints[name] = Any
    return hints


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value has the type of an annotation; True for one that says nothing.

    The elements of tuples are compared too, those of lists and mappings are not.
    """
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if kind is typing.Literal:
        return value in parts
    if not _is_subclass(type(value), kind):
        return False
    if kind is not tuple or not parts:
        return True
    if parts[1:] != (...,):
        return len(value) == len(parts) and all(map(fits, value, parts))
    element = parts[0]
    if isinstance(element, type) and not typing.get_args(element):  # the ids of tokens are many
        return all(_is_subclass(own, element) for own in set(map(type, value)))
    return all(fits(x, element) for x in value)


def _is_subclass(own: type, kind: Any) -> bool:
    if kind is Any:  # a class itself
        return True
    # An integer is a number too, and so are NumPy's.
    wide = {float: (float, int, np.integer, np.floating), int: (int, np.integer)}
    try:
        return issubclass(own, wide.get(kind, kind))
    except TypeError:  # a type variable, a protocol, a dictionary with typed keys
        return True
