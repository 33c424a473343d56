"""PopQA's table: TSV with `id, question, possible_answers` (a JSON list in a cell) and more.

Mallen et al. 2023.
"""

from __future__ import annotations

import json
import pathlib

from jax_ragrl.corpus.formats.files import Record, field, others, read_table
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def _answers(record: Record) -> tuple[str, ...]:
    cell = field(record, "possible_answers", str)
    try:
        # TSV has no lists, so that the cell is a string of JSON.
        answers = json.loads(cell)
    except json.JSONDecodeError:
        answers = None
    if not isinstance(answers, list):
        raise UserError(f"{record.place}: field 'possible_answers' is not a JSON list: {cell[:60]}")
    return tuple(map(str, answers))


def _question(record: Record) -> Question:
    return Question(
        id=field(record, "id", str),
        text=field(record, "question", str),
        answers=_answers(record),
        kind=str(record.fields.get("prop", "")),
        metadata=others(record, "id", "question", "possible_answers"),
    )


def read_popqa(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads questions; `kind` is the relation that the question asks for."""
    return [_question(record) for record in read_table(path, "\t")], []
