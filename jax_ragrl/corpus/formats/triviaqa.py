"""TriviaQA's official JSON: `{"Data": [{QuestionId, Question, Answer {Value, Aliases}, ...}]}`.

Joshi et al. 2017. The evidence files lie beside it and are not read; without them the pages that
a question cites are no gold passages.
"""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import Record, field, others, parts, read_json, strings, unique
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def _question(record: Record) -> Question:
    answer = Record(f"{record.place}, Answer", field(record, "Answer", dict))
    aliases = strings(answer, "Aliases") if "Aliases" in answer.fields else ()
    return Question(
        id=field(record, "QuestionId", str),
        text=field(record, "Question", str),
        answers=unique((field(answer, "Value", str), *aliases)),
        metadata=others(record, "QuestionId", "Question", "Answer"),
    )


def read_triviaqa(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Questions with the answer's value first and its aliases after it."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: not one JSON object with the field 'Data'")
    return [_question(record) for record in parts(Record(str(path), value), "Data")], []
