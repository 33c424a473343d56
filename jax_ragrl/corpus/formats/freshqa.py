"""FreshQA's table: CSV with `id, question, source, num_hops, fact_type, answer_0 ... answer_9`.

Vu et al. 2023. The answers change over time: a file is valid for the date of its release.
"""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import Record, field, others, read_table, unique
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

ANSWERS = tuple(f"answer_{n}" for n in range(10))


def _question(record: Record) -> Question:
    # Questions with fewer than ten answers have empty cells.
    cells = (str(record.fields.get(name, "")).strip() for name in ANSWERS)
    answers = unique(filter(None, cells))
    if not answers:
        raise UserError(f"{record.place}: fields 'answer_0' to 'answer_9' are empty: add an answer")
    return Question(
        id=field(record, "id", str),
        text=field(record, "question", str),
        answers=answers,
        kind=str(record.fields.get("fact_type", "")),
        metadata=others(record, "id", "question", *ANSWERS),
    )


def read_freshqa(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads questions; `kind` states how fast the answer changes."""
    return [_question(record) for record in read_table(path, ",")], []
