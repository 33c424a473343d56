"""Passages in one object `{title: [sentence, ...]}`: HippoRAG's HotpotQA collection."""

from __future__ import annotations

import pathlib
from typing import Any

from jax_ragrl.corpus.formats.files import join_sentences, read_json
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def read_title_sentences(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads passages: the title is the id, the sentences are joined."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: the file must be one JSON object of title: [sentence, ...]")
    return [], [Passage(title, title, _text(path, title, value[title])) for title in value]


def _text(path: pathlib.Path | str, title: str, sentences: Any) -> str:
    """Joins the sentences of a passage; raises `UserError` if they are something else."""
    # Any object of lists has this format, such as one that holds records under a single key.
    if not isinstance(sentences, list) or not all(isinstance(text, str) for text in sentences):
        raise UserError(
            f"{path}: {title!r} is not a list of sentences: if it holds records, give a file with "
            "that list alone"
        )
    return join_sentences(sentences)
