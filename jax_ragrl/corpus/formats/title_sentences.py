"""Passages in one object `{title: [sentence, ...]}`: HippoRAG's HotpotQA collection."""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import Record, Source, joined, read_json
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def read_title_sentences(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads passages: the title is the id, the sentences are joined."""
    passages = []
    for file in [path] if isinstance(path, str | pathlib.Path) else path:
        value = read_json(file)
        if not isinstance(value, dict):
            raise UserError(f"{file}: the file must be one JSON object of title: [sentence, ...]")
        for title, sentences in value.items():
            # Any object of lists has this format, such as one with records under a single key.
            if not isinstance(sentences, list) or not all(isinstance(x, str) for x in sentences):
                raise UserError(
                    f"{file}: {title!r} is not a list of sentences: if it holds records, give a "
                    "file with that list alone"
                )
            passages.append(Passage(title, title, joined(Record(str(file), value), title)))
    return [], passages
