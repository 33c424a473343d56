"""Rows of the RL trainers verl and Search-R1.

`{data_source, prompt [{role, content}], reward_model {ground_truth}, extra_info {question,
answer}}`; `ground_truth` is a text, a list, or Search-R1's `{target: [...]}`.
"""

from __future__ import annotations

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    field,
    optional_text,
    others,
    parts,
    question_text,
    read_records,
)
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question


def _question(record: Record, number: int) -> Question:
    extra = Record(f"{record.place}, extra_info", {})
    if record.fields.get("extra_info"):
        extra = extra._replace(fields=field(record, "extra_info", dict))
    reward = Record(f"{record.place}, reward_model", field(record, "reward_model", dict))
    truth = field(reward, "ground_truth", object)
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        truth = field(reward, "ground_truth", dict)
    if isinstance(truth, dict):
        names = [name for name in ("target", "answer") if name in truth]
        reward = Record(f"{reward.place}, ground_truth", truth)
        correct = answers(reward, names[0] if names else "target")
    else:
        correct = answers(reward, "ground_truth")
    # A list of answers has more of them than the ground truth; a text may be a whole solution.
    if isinstance(extra.fields.get("answer"), list):
        correct = answers(extra, "answer") or correct
    # Preferred to the prompt, which wraps the question in the instructions of another library.
    asked = optional_text(record, "question") or optional_text(extra, "question")
    if not asked:
        users = [m for m in parts(record, "prompt") if m.fields.get("role") == "user"]
        if not users:
            raise UserError(f"{record.place}: field 'prompt' has no user message: add the question")
        asked = question_text(users[-1], "content")  # earlier user messages may be examples
    return Question(
        id=optional_text(record, "id", optional_text(extra, "index", str(number))),
        text=asked,
        answers=correct,
        metadata=others(record, "id", "prompt", "reward_model"),
    )


def read_verl(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads the questions of a file."""
    return [_question(record, n) for n, record in enumerate(read_records(path))], []
