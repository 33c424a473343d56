"""Rows of JSON, one a line of a file: a line that a killed run has torn is no row.

JSON has no nan and no infinity, which only Python reads: null stands for them.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def append(file: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Adds a line of JSON to a file."""
    with file.open("a", encoding="utf-8") as out:
        out.write(_json(row) + "\n")


def write_json(file: pathlib.Path, value: Any) -> None:
    """Writes whole or not at all."""
    _write(file, [_json(value, indent=2)])


def write_rows(file: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes lines of JSON, all or none, one at a time: a file may be large."""
    _write(file, map(_json, rows))


def rows_of(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, which may not be there; one that a killed run has torn is left out."""
    if not file.exists():
        return
    with file.open(encoding="utf-8") as opened:
        for line in opened:
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def keep_rows(file: pathlib.Path, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drops the other rows of a file, and torn ones, a line at a time: it may be large."""
    if not file.exists():
        return
    write_rows(file, filter(wanted, rows_of(file)))


def keep_until(file: pathlib.Path, step: int) -> None:
    """Drops rows after `step`, a torn last line among them."""
    keep_rows(file, lambda row: row["step"] <= step)


def _write(file: pathlib.Path, lines: Iterable[str]) -> None:
    draft = file.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as out:
        out.writelines(f"{line}\n" for line in lines)
    draft.replace(file)


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """The same with None for every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
