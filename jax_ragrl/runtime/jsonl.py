"""JSON files and JSONL files, which have one record per line.

JSON has no nan and no infinity (only Python's reader accepts them), so that null is written for
them. A line without a JSON object, such as one that an interrupted run or a full disk has left
incomplete, is ignored.
"""

from __future__ import annotations

import collections
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jax_ragrl.json_text import loads_or_none
from jax_ragrl.runtime.caches import draft_file


def append_row(file: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Appends a record to a file, which is created if it does not exist."""
    with file.open("a", encoding="utf-8") as out:
        out.write(_json(row) + "\n")


def write_json(file: pathlib.Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    _write(file, [_json(value, indent=2)])


def write_rows(file: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a JSONL file atomically; `rows` is consumed one at a time, since it may be large."""
    _write(file, map(_json, rows))


def read_rows(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the complete records of a file; there are none if the file does not exist."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for line in lines:
            if isinstance(row := loads_or_none(line), dict):
                yield row


def last_row(file: pathlib.Path) -> dict[str, Any]:
    """Returns the last record of a file; empty if there is none."""
    rows = collections.deque(read_rows(file), maxlen=1)
    return rows[0] if rows else {}


def filter_rows(file: pathlib.Path, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Removes all other records from a file, if it exists, and incomplete lines."""
    if not file.exists():
        return
    write_rows(file, filter(wanted, read_rows(file)))


def drop_after_step(file: pathlib.Path, step: int) -> None:
    """Removes the records of later steps, which a resumed run writes again."""
    filter_rows(file, lambda row: isinstance(row.get("step"), int) and row["step"] <= step)


def _write(file: pathlib.Path, lines: Iterable[str]) -> None:
    with draft_file(file) as draft, draft.open("w", encoding="utf-8") as out:
        out.writelines(f"{line}\n" for line in lines)


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # only now, since numbers are almost always finite
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
