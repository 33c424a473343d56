"""Natural Questions, open: `{question, answer}`, and the oracle form with gold passages.

Kwiatkowski et al. 2019, Lee et al. 2019; the oracle form `{question, answers, ctxs [{title, text,
isgold}]}` is that of Liu et al. 2023. Neither has ids: the id of a question is its position.
"""

from __future__ import annotations

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
from jax_ragrl.corpus.formats.hotpotqa import passages_by_title
from jax_ragrl.corpus.formats.look import look
from jax_ragrl.corpus.formats.own import own_fields, read_own_questions
from jax_ragrl.types import Passage, Question


def read_nq_open(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; a file may also have ids and gold passages, as in `own.py`."""
    own = own_fields("questions", look(path).fields)
    return read_own_questions(path, own, prefix="nq"), []


def _oracle_question(record: Record, number: int) -> Question:
    contexts = parts(record, "ctxs")
    return Question(
        id=f"nq{number}",
        text=question_text(record, "question"),
        answers=answers(record, "answers"),
        gold=unique(text(c, "title") for c in contexts if c.fields.get("isgold")),
        metadata=others(record, "question", "answers", "ctxs"),
    )


def read_nq_oracle(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions with gold titles, and their passages."""
    records = list(read_records(path))
    found = (context for record in records for context in parts(record, "ctxs"))
    contexts = ((text(c, "title"), text(c, "text")) for c in found)
    return [_oracle_question(record, n) for n, record in enumerate(records)], passages_by_title(
        contexts
    )
