"""A language model that grades answers, as in C-3PO's reward and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM, without_thoughts
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import LLMRequest, Question


def grade_answers(
    judge: FrozenLLM, questions: Sequence[Question], answers: Sequence[str | None]
) -> np.ndarray:
    """Grades answers with a language model.

    Args:
      judge: the language model; equal requests are sent once.
      questions: with their gold answers.
      answers: one per question; None is wrong without a request.

    Returns:
      float64 `[Q]`: 1 if the reply contains "true" in any case, else 0; nan if the judge failed.
    """
    requests = [
        # An empty answer is wrong whatever the judge replies.
        _verdict(question, answer) if answer else None
        for question, answer in zip(questions, answers, strict=True)
    ]
    # Siblings often give the same answer to the same question.
    distinct = list(dict.fromkeys(request for request in requests if request is not None))
    replies = without_thoughts(judge.complete(distinct)) if distinct else []
    grade = {r: _grade(reply) for r, reply in zip(distinct, replies, strict=True)}
    grades = [0.0 if request is None else grade[request] for request in requests]
    return np.array(grades, np.float64)


def _grade(reply: str | EffectError) -> float:
    # nan rather than 0: a failure of the judge does not make an answer wrong.
    return float("nan") if isinstance(reply, EffectError) else float("true" in reply.lower())


def _verdict(question: Question, prediction: str) -> LLMRequest:
    gold = " | ".join(question.answers)
    values = {"question": question.text, "answers": gold, "prediction": prediction}
    return LLMRequest("judge", user_turn("judge", "judge", **values))
