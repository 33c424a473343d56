"""This library's passage format: JSON lines `{"id", "title", "text"}`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import Record, field, read_records
from jax_ragrl.types import Passage, Question


def _passage(record: Record) -> Passage:
    key = str(field(record, "id", object))
    # The title may also be null.
    title = str(field(record, "title", object) or "")
    return Passage(key, title, field(record, "text", str))


def read_passages_jsonl(path: pathlib.Path | str) -> tuple[list[Question], Iterator[Passage]]:
    """Reads passages lazily; a numeric id becomes a string."""
    return [], map(_passage, read_records(path))
