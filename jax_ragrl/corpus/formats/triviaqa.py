"""TriviaQA's official JSON: `{"Data": [{QuestionId, Question, Answer {Value, Aliases}, ...}]}`.

Joshi et al. 2017. The separate evidence files are not read, so the pages that a question cites are
not gold passages.
"""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    others,
    parts,
    question_text,
    read_json,
    text,
)
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def _question(record: Record) -> Question:
    return Question(
        id=text(record, "QuestionId"),
        text=question_text(record, "Question"),
        answers=answers(record, "Answer"),
        metadata=others(record, "QuestionId", "Question", "Answer"),
    )


def read_triviaqa(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; the first answer is the value, its aliases follow."""
    questions = list[Question]()
    for file in [path] if isinstance(path, str | pathlib.Path) else path:
        value = read_json(file)
        if not isinstance(value, dict):
            raise UserError(f"{file}: the file must be one JSON object with the field 'Data'")
        questions += map(_question, parts(Record(str(file), value), "Data"))
    return questions, []
