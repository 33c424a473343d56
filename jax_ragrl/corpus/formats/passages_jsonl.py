"""The library's own passages: JSONL `{"id", "title", "text"}`."""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import field, read_records
from jax_ragrl.types import Passage, Question


def read_passages_jsonl(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Passages with their own ids; numbers are taken as their digits."""
    passages = []
    for record in read_records(path):
        key = str(field(record, "id", object))
        passages.append(Passage(key, field(record, "title", str), field(record, "text", str)))
    return [], passages
