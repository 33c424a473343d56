"""AmbigNQ, full or light: `{id, question, annotations [{type, answer | qaPairs}]}`.

Min et al. 2020. An ambiguous question has one answer list per reading; an answer of any reading is
correct.
"""

from __future__ import annotations

from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    others,
    parts,
    question_text,
    read_records,
    text,
    unique,
)
from jax_ragrl.types import Passage, Question


def _answers(record: Record) -> Iterator[str]:
    for annotation in parts(record, "annotations"):
        # `multipleQAs` has a list of answers per reading, `singleAnswer` has its answers directly.
        # On the Hub each annotation has both fields, and one is empty.
        if annotation.fields.get("qaPairs") is not None:
            for pair in parts(annotation, "qaPairs"):
                yield from answers(pair, "answer")
        if "answer" in annotation.fields or "qaPairs" not in annotation.fields:
            yield from answers(annotation, "answer")


def _question(record: Record) -> Question:
    kinds = unique(text(a, "type") for a in parts(record, "annotations"))
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=unique(_answers(record)),
        kind="+".join(kinds),
        metadata=others(record, "id", "question"),
    )


def read_ambignq(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions with the answers of all their readings."""
    return [_question(record) for record in read_records(path)], []
