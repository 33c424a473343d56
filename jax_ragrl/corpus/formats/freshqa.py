"""FreshQA's table: CSV with `id, question, source, num_hops, fact_type, answer_0 ... answer_9`.

Vu et al. 2023. The answers change over time: a file is valid for the date of its release.
"""

from __future__ import annotations

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    optional_text,
    others,
    question_text,
    read_records,
    text,
    unique,
)
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

ANSWERS = tuple(f"answer_{n}" for n in range(10))


def _question(record: Record) -> Question:
    # Questions with fewer than ten answers have empty cells.
    cells = (optional_text(record, name).strip() for name in ANSWERS)
    answers = unique(filter(None, cells))
    if not answers:
        raise UserError(f"{record.place}: fields 'answer_0' to 'answer_9' are empty: add an answer")
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=answers,
        kind=optional_text(record, "fact_type"),
        metadata=others(record, "id", "question", *ANSWERS),
    )


def read_freshqa(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; `kind` states how fast the answer changes."""
    return [_question(record) for record in read_records(path)], []
