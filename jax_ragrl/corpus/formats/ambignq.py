"""AmbigNQ, full or light: `{id, question, annotations [{type, answer | qaPairs}]}`.

Min et al. 2020. An ambiguous question has one answer list per reading; an answer of any reading is
correct.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import (
    Record,
    field,
    others,
    parts,
    read_records,
    strings,
    unique,
)
from jax_ragrl.types import Passage, Question


def _answers(record: Record) -> Iterator[str]:
    for annotation in parts(record, "annotations"):
        # `multipleQAs` has a list of answers per reading, `singleAnswer` has its answers directly.
        if "qaPairs" in annotation.fields:
            for pair in parts(annotation, "qaPairs"):
                yield from strings(pair, "answer")
        else:
            yield from strings(annotation, "answer")


def _question(record: Record) -> Question:
    kinds = unique(field(a, "type", str) for a in parts(record, "annotations"))
    return Question(
        id=str(field(record, "id", object)),
        text=field(record, "question", str),
        answers=unique(_answers(record)),
        kind="+".join(kinds),
        metadata=others(record, "id", "question"),
    )


def read_ambignq(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads questions with the answers of all their readings."""
    return [_question(record) for record in read_records(path)], []
