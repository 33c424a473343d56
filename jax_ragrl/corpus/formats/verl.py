"""Rows of the RL trainers verl and Search-R1, as JSON lines or parquet.

`{data_source, prompt [{role, content}], reward_model {ground_truth}, extra_info {question,
answer}}`; `ground_truth` is a string, a list, or Search-R1's `{target: [...]}`.
"""

from __future__ import annotations

import pathlib
from typing import Any

from jax_ragrl.corpus.formats.files import (
    Record,
    field,
    others,
    parts,
    read_parquet,
    read_records,
)
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def _answers(value: Any) -> tuple[str, ...]:
    if isinstance(value, dict):
        value = value.get("target", value.get("answer"))
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


def _extra(record: Record) -> dict[str, Any]:
    extra = record.fields.get("extra_info")
    return extra if isinstance(extra, dict) else {}


def _text(record: Record) -> str:
    """Returns the question of a row, or else the last user message of its prompt."""
    # Preferred to the prompt, which wraps the question in the instructions of another library.
    for text in (record.fields.get("question"), _extra(record).get("question")):
        if isinstance(text, str) and text:
            return text
    users = [m for m in parts(record, "prompt") if m.fields.get("role") == "user"]
    if not users:
        raise UserError(f"{record.place}: field 'prompt' has no user message: add the question")
    # Earlier user messages may be examples.
    return field(users[-1], "content", str)


def _question(record: Record, number: int) -> Question:
    extra = _extra(record)
    reward = Record(f"{record.place}, reward_model", field(record, "reward_model", dict))
    # A list of answers has more of them than the ground truth; a text may be a whole solution.
    listed, truth = extra.get("answer"), field(reward, "ground_truth", object)
    answers = (_answers(listed) if isinstance(listed, list) else ()) or _answers(truth)
    return Question(
        id=str(record.fields.get("id", extra.get("index", number))),
        text=_text(record),
        answers=answers,
        metadata=others(record, "id", "prompt", "reward_model"),
    )


def read_verl(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads the questions of a JSON lines file."""
    return [_question(record, n) for n, record in enumerate(read_records(path))], []


def read_verl_parquet(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads the questions of a parquet file."""
    return [_question(record, n) for n, record in enumerate(read_parquet(path))], []
