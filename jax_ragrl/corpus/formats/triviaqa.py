"""TriviaQA's official JSON: `{"Data": [{QuestionId, Question, Answer {Value, Aliases}, ...}]}`.

Joshi et al. 2017. The separate evidence files are not read, so the pages that a question cites are
not gold passages.
"""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import Record, field, others, parts, read_json, strings, unique
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def _question(record: Record) -> Question:
    # A record of its fields, so that errors name both the question and the nested object.
    answer = Record(f"{record.place}, Answer", field(record, "Answer", dict))
    aliases = strings(answer, "Aliases") if "Aliases" in answer.fields else ()
    return Question(
        id=field(record, "QuestionId", str),
        text=field(record, "Question", str),
        answers=unique((field(answer, "Value", str), *aliases)),
        metadata=others(record, "QuestionId", "Question", "Answer"),
    )


def read_triviaqa(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads questions; the first answer is the value, its aliases follow."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: the file must be one JSON object with the field 'Data'")
    return [_question(record) for record in parts(Record(str(path), value), "Data")], []
