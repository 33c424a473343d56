"""Passages in one object `{title: [sentence, ...]}`: HippoRAG's HotpotQA collection."""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import Record, join_sentences, read_json, strings
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def read_title_sentences(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads passages: the title is the id, the sentences are joined."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: the file must be one JSON object of title: [sentence, ...]")
    record = Record(str(path), value)
    return [], [Passage(title, title, join_sentences(strings(record, title))) for title in value]
