"""The shape of a data file and the fields of its first record, from its content."""

from __future__ import annotations

import csv
import io
import json
import pathlib
from typing import Any, NamedTuple

from jax_ragrl.corpus.formats.documents import SUFFIXES
from jax_ragrl.corpus.formats.files import (
    PARQUET_MAGIC,
    parquet_columns,
    parse_json,
    read_head,
    read_json,
)
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads


class FileLook(NamedTuple):
    """The shape of a file, and the fields of its first record."""

    shape: str
    fields: frozenset[str]


def _first_of_list(text: str) -> Any:
    """Parses the first entry of a JSON list that may be truncated after it."""
    return json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]


def _look_at_list(path: pathlib.Path, text: str) -> FileLook:
    """Describes a file that starts with a bracket: a JSON list of records."""
    try:
        return FileLook("records", _names(_first_of_list(text)))
    except json.JSONDecodeError:
        # An empty list, an entry longer than the head, or malformed JSON: parse it all to know.
        if values := read_json(path):
            return FileLook("records", _names(values[0]))
        raise UserError(f"{path} is empty: give a file with records") from None


def _look_at_table(line: str) -> FileLook:
    """Describes a file whose first line is not JSON: the columns of a table."""
    shape, delimiter = ("tsv", "\t") if "\t" in line else ("csv", ",")
    try:
        names = next(csv.reader(io.StringIO(line), delimiter=delimiter), [])
    except csv.Error:  # a cell that is longer than the name of any column
        names = []
    return FileLook(shape, frozenset(names))


def _names(value: Any) -> frozenset[str]:
    return frozenset(value) if isinstance(value, dict) else frozenset()


def _look_at_objects(path: pathlib.Path, text: str) -> FileLook:
    """Describes a file that starts with a brace: JSON lines, or one object."""
    first, _, rest = text.lstrip().partition("\n")
    number = text[: len(text) - len(text.lstrip())].count("\n") + 1
    try:
        value = loads(first)
    except ValueError:
        # An object over several lines, or a malformed first line, which `parse_json` reports.
        spans_lines = not rest.lstrip().startswith("{")
        value = read_json(path) if spans_lines else parse_json(first, path, number)
        return FileLook("object", _names(value))
    # One line may be a whole file: TriviaQA's object, or titles with lists of sentences. One record
    # of JSON lines has values of several types.
    single = not rest.strip() and ("Data" in value or set(map(type, value.values())) == {list})
    return FileLook("object" if single else "records", _names(value))


def look(path: pathlib.Path | str) -> FileLook:
    """Returns the shape of a file and its first fields, from its content.

    Raises:
      UserError: the file is missing, empty, or neither UTF-8 text nor parquet.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        is_beir = any(path.glob("corpus.jsonl*")) or any(path.glob("queries.jsonl*"))
        return FileLook("folder" if is_beir else "documents", frozenset())
    # The content of documents does not distinguish them from other text.
    if path.is_file() and path.suffix.lower() in SUFFIXES - {".txt"}:
        return FileLook("documents", frozenset())
    # The head suffices in almost every case: a corpus may have tens of gigabytes.
    head = read_head(path)
    if head.startswith(PARQUET_MAGIC):
        return FileLook("parquet", frozenset(parquet_columns(path)))
    # Another encoding is reported when the records are read, with the position of the first bad
    # byte.
    text = head.decode("utf-8-sig", errors="replace")
    opening = text.lstrip()[:1]
    if not opening:
        raise UserError(f"{path} is empty: give a file with records")
    if opening == "[":
        return _look_at_list(path, text)
    if opening == "{":
        return _look_at_objects(path, text)
    first = text.splitlines()[0]
    # Text files may hold JSON lines or a table with tabs.
    is_text = path.suffix.lower() == ".txt" and "\t" not in first
    return FileLook("documents", frozenset()) if is_text else _look_at_table(first)
