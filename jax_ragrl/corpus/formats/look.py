"""The files that a name means; the shape of a data file and the fields of its first record."""

from __future__ import annotations

import csv
import glob
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_ragrl.corpus.formats.documents import SHARD, SUFFIXES, files_below
from jax_ragrl.corpus.formats.files import parquet_columns, parse_json, read_head, read_json
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads

ABOUT = re.compile(r"(readme|license|licence|citation)\b", re.IGNORECASE)  # documents about a set


class FileLook(NamedTuple):
    """The shape of a file, and the fields of its first record."""

    shape: str
    fields: frozenset[str]


def data_files(path: pathlib.Path | str) -> list[pathlib.Path]:
    """Returns the files that a name means, in order: they are read as one.

    It is a file; a folder of shards, of documents, or of a BEIR set, the last two of which stay
    folders; a pattern (`shards/*.parquet`); or several of them, separated by commas.

    Raises:
      UserError: no file matches a pattern, or a folder has shards of several kinds.
    """
    text = str(path)
    if os.path.isdir(text):
        return _shards(pathlib.Path(text)) or [pathlib.Path(text)]
    # Not `pathlib`, which fails for a text that is too long to be a path.
    if os.path.exists(text):
        return [pathlib.Path(text)]
    if "," in text:
        names = filter(None, map(str.strip, text.split(",")))
        return [file for name in names for file in data_files(name)]
    if glob.has_magic(text):
        matches = sorted(glob.glob(text, recursive=True))
        if not matches:
            raise UserError(f"no file matches {text}: correct the pattern")
        return [file for name in matches for file in data_files(name)]
    return [pathlib.Path(text)]


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the data files of a folder that is neither a BEIR set nor has documents."""
    if any(folder.glob("corpus.jsonl*")) or any(folder.glob("queries.jsonl*")):
        return []
    files = [path.relative_to(folder) for path in files_below(folder)]
    if any(path.suffix.lower() in SUFFIXES and not ABOUT.match(path.name) for path in files):
        return []
    kind_of = {path: match[1] for path in files if (match := SHARD.search(path.name))}
    if len(examples := {kind: path for path, kind in kind_of.items()}) > 1:
        names = " and ".join(map(str, examples.values()))
        raise UserError(
            f"{folder} holds data files of several kinds, such as {names}: name those of one kind, "
            f"such as {folder}/*.{next(iter(examples))}"
        )
    return [folder / path for path in kind_of]


def _look_at_list(path: pathlib.Path, text: str) -> FileLook:
    try:
        # The first entry, because the head may end after it.
        first = json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]
    except (ValueError, RecursionError):
        # An empty list, an entry longer than the head, or malformed JSON: parse it all to know.
        values = read_json(path)
        if not values:
            raise UserError(f"{path} is empty: give a file with records") from None
        first = values[0]
    return FileLook("records", _names(first))


def _names(value: Any) -> frozenset[str]:
    return frozenset(value) if isinstance(value, dict) else frozenset()


def _look_at_objects(path: pathlib.Path, text: str) -> FileLook:
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


def look(files: Sequence[pathlib.Path]) -> FileLook:
    """Returns shape and first fields of files, by the first one; `UserError` if unreadable."""
    path = files[0]
    if path.is_dir():
        is_beir = any(path.glob("corpus.jsonl*")) or any(path.glob("queries.jsonl*"))
        return FileLook("folder" if is_beir else "documents", frozenset())
    # The content of documents does not distinguish them from other text.
    if path.is_file() and path.suffix.lower() in SUFFIXES - {".txt"}:
        return FileLook("documents", frozenset())
    # The head suffices in almost every case: a corpus may have tens of gigabytes.
    container, text = read_head(path)
    if container == "parquet":
        return FileLook("parquet", frozenset(parquet_columns(path)))
    if container == "list":
        return _look_at_list(path, text)
    if container == "lines":
        return _look_at_objects(path, text)
    first = text.splitlines()[0]
    # Text files may hold JSON lines or a table with tabs.
    if path.suffix.lower() == ".txt" and "\t" not in first:
        return FileLook("documents", frozenset())
    if not first.strip():
        raise UserError(f"{path}: line 1 is blank, where a table names its columns: remove it")
    try:
        names = next(csv.reader([first], delimiter=container), [])
    except csv.Error:  # a cell that is longer than the name of any column
        names = []
    return FileLook("tsv" if container == "\t" else "csv", frozenset(names))
