"""PopQA: `id, question, possible_answers` (a JSON list in a text) and more.

Mallen et al. 2023. The published file is a TSV.
"""

from __future__ import annotations

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    field,
    optional_text,
    others,
    question_text,
    read_records,
    text,
)
from jax_ragrl.types import Passage, Question


def _question(record: Record) -> Question:
    listed = Record(record.place, {"possible_answers": field(record, "possible_answers", list)})
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=answers(listed, "possible_answers"),
        kind=optional_text(record, "prop"),
        metadata=others(record, "id", "question", "possible_answers"),
    )


def read_popqa(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; `kind` is the relation that the question asks for."""
    return [_question(record) for record in read_records(path)], []
