"""Reading records from files: JSON, JSONL and tables, plain or gzipped, with errors that say where.

A record travels with its place ("x.jsonl, line 3"; for a JSON list "x.json, record 3"), so that a
reader that misses a field can name it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from jax_ragrl.errors import UserError

T = TypeVar("T")
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
HALF = re.compile("[\ud800-\udfff]")
HEAD_BYTES = 1 << 22  # enough for the first record of almost every file


class Record(NamedTuple):
    """One record and where it was found."""

    place: str
    fields: Mapping[str, Any]


def open_bytes(path: pathlib.Path | str) -> gzip.GzipFile | io.BufferedReader:
    """The bytes of a file, unzipped where its first two bytes say gzip (the name does not count).

    Raises:
      UserError: the path is missing or a folder.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {why}: give the path of a data file")
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    return gzip.open(path, "rb") if zipped else path.open("rb")


def read_head(path: pathlib.Path | str) -> bytes:
    """The first bytes of a file, unzipped, and the rest of the line that they end in."""
    with open_bytes(path) as file:
        return _guarded(path, lambda: file.read(HEAD_BYTES) + file.readline())


def _guarded(path: pathlib.Path | str, read: Callable[[], T]) -> T:
    """`read()`, with damaged archives and other encodings turned into a user's error."""
    try:
        return read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}): copy it again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}: convert it to UTF-8") from error


def read_lines(path: pathlib.Path | str) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of every line that is not blank."""
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="\n") as file:
        number = 0
        while line := _guarded(path, file.readline):
            number += 1
            if line.strip():
                yield number, line


def loads(text: str) -> Any:
    """The JSON value of a text. U+FFFD stands where it has half a surrogate pair, as texts cut in
    the middle of a character do: neither UTF-8 nor a tokenizer takes one."""
    value = json.loads(text)
    if "\\ud" not in text and "\\uD" not in text:  # most have no pair at all
        return value
    return json.loads(HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))


def parse_json(text: str, path: pathlib.Path | str, first_line: int = 1) -> Any:
    """The JSON value of a text that starts on `first_line` of a file."""
    try:
        return loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(
            f"{path}, line {line}: malformed JSON ({error.msg} at column {error.colno}): "
            "repair or remove it"
        ) from error


def read_json(path: pathlib.Path | str) -> Any:
    """The one JSON value of a file."""
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as file:
        return parse_json(_guarded(path, file.read), path)


def first_character(path: pathlib.Path | str) -> str:
    """The first character of a text file that is not blank; empty for an empty file."""
    with open_bytes(path) as file:
        head = _guarded(path, lambda: file.read(4096))
    return head.decode("utf-8-sig", errors="ignore").lstrip()[:1]


def read_records(path: pathlib.Path | str) -> Iterator[Record]:
    """The objects of a JSON list or of a JSONL file, in order.

    Raises:
      UserError: malformed JSON, or an entry that is not an object.
    """
    if first_character(path) == "[":
        values = enumerate(read_json(path), start=1)
        placed = ((f"{path}, record {n}", value) for n, value in values)
    else:
        lines = read_lines(path)
        placed = ((f"{path}, line {n}", parse_json(line.rstrip(), path, n)) for n, line in lines)
    for place, value in placed:
        if not isinstance(value, dict):
            raise UserError(f"{place}: holds {type(value).__name__}, not a JSON object of fields")
        yield Record(place, value)


def read_table(path: pathlib.Path | str, delimiter: str) -> Iterator[Record]:
    """The rows of a CSV or TSV file whose first row names the columns."""
    # Cells may hold whole articles; the limit is a C long, 32 bits on some systems.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter)
        while (row := _guarded(path, lambda: next(rows, None))) is not None:
            fields = {name: value for name, value in row.items() if name and value is not None}
            yield Record(f"{path}, line {rows.line_num}", fields)


def field(record: Record, name: str, kind: type[T]) -> T:
    """A required field of a record.

    Raises:
      UserError: the field is missing or of another type; names file, line and field.
    """
    if name not in record.fields:
        there = ", ".join(record.fields) or "nothing"
        raise UserError(f"{record.place}: field {name!r} is missing (there: {there}): add it")
    value = record.fields[name]
    if not isinstance(value, kind):
        raise UserError(
            f"{record.place}: field {name!r} holds {type(value).__name__}, "
            f"expected {kind.__name__}: rewrite it"
        )
    return value


def strings(record: Record, name: str) -> tuple[str, ...]:
    """A required list field, its entries as strings; `UserError` for one that is null."""
    entries = field(record, name, list)
    if None in entries:
        raise UserError(f"{record.place}: field {name!r} has a null in its list: remove it")
    return tuple(map(str, entries))


def parts(record: Record, name: str) -> Iterator[Record]:
    """A required list of objects, each with its place."""
    for n, entry in enumerate(field(record, name, list), start=1):
        place = f"{record.place}, {name} {n}"
        if not isinstance(entry, dict):
            raise UserError(f"{place}: holds {type(entry).__name__}, not an object of fields")
        yield Record(place, entry)


def others(record: Record, *names: str) -> dict[str, Any]:
    """The fields of a record that a reader has not used: a question's metadata."""
    return {name: value for name, value in record.fields.items() if name not in names}


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, in order of first appearance."""
    return tuple(dict.fromkeys(names))


def joined(sentences: Iterable[Any]) -> str:
    """Sentences as one text: some data sets keep the space before a sentence, others drop it."""
    return " ".join(filter(None, (str(sentence).strip() for sentence in sentences)))
