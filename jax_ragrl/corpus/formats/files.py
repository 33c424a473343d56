"""Readers of records from files: JSON, JSON lines and tables, plain or gzipped.

A record carries its place ("x.jsonl, line 3"; in a JSON list "x.json, record 3"), so that an error
about a missing field can name it.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import gzip
import io
import itertools
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads

T = TypeVar("T")
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
MAX_RECORD = 1 << 26  # characters of a line; a zipped file of a megabyte may hold one of gigabytes
ADJACENT_STRINGS = re.compile(r"""['"]\s+[rRbBuU]?['"]""")
HEAD_BYTES = 1 << 22  # enough for the first record of almost every file


class Record(NamedTuple):
    """One record, and its place in a file for error messages."""

    place: str
    fields: Mapping[str, Any]


def open_bytes(path: pathlib.Path | str) -> gzip.GzipFile | io.BufferedReader:
    """Opens a file for reading bytes, unzipped if its first two bytes identify gzip.

    The file name does not matter: data sets often lack the suffix.

    Raises:
      UserError: the path is missing or a folder.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {why}: give the path of a data file")
    with path.open("rb") as file:
        is_gzip = file.read(2) == GZIP_MAGIC
    return gzip.open(path, "rb") if is_gzip else path.open("rb")


def read_head(path: pathlib.Path | str) -> bytes:
    """Returns the first bytes of a file, unzipped, up to the end of a line."""
    with open_bytes(path) as file:
        # The rest of the line completes the last record of JSON lines.
        return _guarded(path, lambda: file.read(HEAD_BYTES) + file.readline(MAX_RECORD))


def _guarded(path: pathlib.Path | str, read: Callable[[], T]) -> T:
    """Calls `read()`; a damaged archive or another encoding becomes a `UserError`."""
    try:
        return read()
    except csv.Error as error:
        raise UserError(f"{path}: malformed table ({error}): correct it") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}): copy it again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}: convert it to UTF-8") from error


def read_lines(path: pathlib.Path | str) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line) of every line that is not blank."""
    # Files from Windows often begin with a byte order mark, which `utf-8-sig` removes.
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="\n") as file:
        number = 0
        # Not a for loop, because damage in the file raises its error within each read.
        while line := _guarded(path, lambda: file.readline(MAX_RECORD + 1)):
            number += 1
            if len(line) > MAX_RECORD:
                raise UserError(
                    f"{path}, line {number}: longer than {MAX_RECORD} characters: split the record"
                )
            if line.strip():
                yield number, line


def parse_json(text: str, path: pathlib.Path | str, first_line: int = 1) -> Any:
    """Parses JSON text of a file.

    Args:
      text: the JSON.
      path: the file, for error messages.
      first_line: the line of the file on which the text starts, for error messages.

    Raises:
      UserError: malformed JSON; names file, line and column.
    """
    try:
        return loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(
            f"{path}, line {line}: malformed JSON ({error.msg} at column {error.colno}): "
            "repair or remove it"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path}, line {first_line}: malformed JSON ({error}): repair or remove it"
        ) from error


def read_json(path: pathlib.Path | str) -> Any:
    """Reads a file that holds one JSON value."""
    return parse_json(read_text(path), path)


def read_text(path: pathlib.Path | str) -> str:
    """Reads a text file in UTF-8, plain or gzipped."""
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as file:
        return _guarded(path, file.read)


def first_character(path: pathlib.Path | str) -> str:
    """Returns the first character of a text file that is not blank; empty for an empty file."""
    with open_bytes(path) as file:
        head = _guarded(path, lambda: file.read(4096))
    # The last of the 4096 bytes may be a part of a character.
    return head.decode("utf-8-sig", errors="ignore").lstrip()[:1]


def read_records(path: pathlib.Path | str) -> Iterator[Record]:
    """Yields the objects of a JSON list or of a JSON lines file, in order.

    Raises:
      UserError: malformed JSON, or an entry that is not an object.
    """
    if first_character(path) == "[":
        values = enumerate(read_json(path), start=1)
        entries = ((f"{path}, record {n}", value) for n, value in values)
    else:
        # Parsed line by line, so that a large corpus never has to fit in memory.
        lines = read_lines(path)
        entries = ((f"{path}, line {n}", parse_json(line.rstrip(), path, n)) for n, line in lines)
    for place, value in entries:
        if not isinstance(value, dict):
            raise UserError(f"{place}: holds {type(value).__name__}, not a JSON object of fields")
        yield Record(place, value)


def read_table(path: pathlib.Path | str, delimiter: str) -> Iterator[Record]:
    """Yields the rows of a CSV or TSV file whose first row names the columns.

    Raises:
      UserError: a row has text beyond the last column, whose other cells may be shifted, or a
        quotation mark that is not closed, after which all rows would be one cell.
    """
    csv.field_size_limit(MAX_RECORD)  # cells may contain whole articles
    # The csv module requires `newline=""` to keep line breaks within quoted cells.
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        while (row := _guarded(path, lambda: next(rows, None))) is not None:
            # `DictReader` puts surplus cells under the name None, and None into missing cells.
            fields = {name: value for name, value in row.items() if name and value is not None}
            place = f"{path}, line {rows.line_num}"
            # Empty ones are harmless: spreadsheets write them.
            if any(map(str.strip, row.get(None) or ())):
                raise UserError(
                    f"{place}: more cells than the {len(rows.fieldnames or ())} columns: put "
                    "quotation marks around cells that contain the delimiter"
                )
            yield Record(place, fields)


def read_parquet(path: pathlib.Path | str) -> Iterator[Record]:
    """Yields the rows of a parquet file lazily, numbered from 1.

    Raises:
      UserError: the file is damaged.
    """
    with _parquet(path) as file:
        batches = (batch.to_pylist() for batch in file.iter_batches())
        for n, row in enumerate(itertools.chain.from_iterable(batches), start=1):
            yield Record(f"{path}, record {n}", row)


def parquet_columns(path: pathlib.Path | str) -> list[str]:
    """Returns the names of the columns of a parquet file; errors as `read_parquet`."""
    with _parquet(path) as file:
        return list(file.schema_arrow.names)


@contextlib.contextmanager
def _parquet(path: pathlib.Path | str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet  # here, because it takes half a second

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged parquet file ({error}): copy it again") from error


def field(record: Record, name: str, kind: type[T]) -> T:
    """Returns a required field of a record.

    Args:
      record: the record.
      name: the field.
      kind: the required type; `object` accepts any.

    Raises:
      UserError: the field is missing or of another type; names file, line and field.
    """
    if name not in record.fields:
        present = ", ".join(record.fields) or "none"
        raise UserError(f"{record.place}: field {name!r} is missing (fields: {present}): add it")
    value = record.fields[name]
    if not isinstance(value, kind):
        raise UserError(
            f"{record.place}: field {name!r} holds {type(value).__name__}, "
            f"expected {kind.__name__}: rewrite it"
        )
    return value


def strings(record: Record, name: str) -> tuple[str, ...]:
    """Returns a required list field as strings; raises `UserError` for a null entry."""
    entries = field(record, name, list)
    # Otherwise the text "None" would become an answer.
    if None in entries:
        raise UserError(f"{record.place}: field {name!r} has a null in its list: remove it")
    return tuple(map(str, entries))


def texts(record: Record, name: str) -> tuple[str, ...]:
    """Returns a required field, a list or a single value, as strings.

    A table has no lists, so that a cell may hold one as JSON, or as pandas writes it. An empty cell
    and a null mean that there is nothing.
    """
    value = field(record, name, object)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _list_of(value)
    if isinstance(value, list | tuple):
        return strings(Record(record.place, {name: list(value)}), name)
    return () if value is None or value == "" else (str(value),)


def _list_of(text: str) -> Any:
    """Returns the list that a text is in JSON or in Python; any other text as it is."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)
    # Python joins strings without a comma, as in an array of NumPy: "['a' 'b']" would be ['ab'].
    if not ADJACENT_STRINGS.search(text):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = ast.literal_eval(text.strip())
            if isinstance(value, list) and all(isinstance(x, str | int | float) for x in value):
                return value
    return text  # that begins with a bracket, such as "[sic] ..."


def parts(record: Record, name: str) -> Iterator[Record]:
    """Yields the objects of a required list field, each with its place."""
    for n, entry in enumerate(field(record, name, list), start=1):
        place = f"{record.place}, {name} {n}"
        if not isinstance(entry, dict):
            raise UserError(f"{place}: holds {type(entry).__name__}, not an object of fields")
        yield Record(place, entry)


def others(record: Record, *names: str) -> dict[str, Any]:
    """Returns the fields of a record other than `names`: a question's metadata."""
    return {name: value for name, value in record.fields.items() if name not in names}


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Removes duplicates; keeps the order of first appearance."""
    return tuple(dict.fromkeys(names))


def join_sentences(sentences: Iterable[Any]) -> str:
    """Joins sentences by one space; some data sets keep the space before a sentence."""
    return " ".join(filter(None, (str(sentence).strip() for sentence in sentences)))
