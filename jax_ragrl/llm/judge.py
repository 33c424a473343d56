"""A language model that grades answers: the paper of C-3PO measures, and rewards, by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import LLMRequest, Question


def judged(
    judge: FrozenLLM, questions: Sequence[Question], answers: Sequence[str | None]
) -> np.ndarray:
    """A language model's verdicts, float64 `[Q]`: 1 where its reply holds "true", in any case.

    No answer is wrong without asking, and one that is there again is asked about once; nan where
    the judge failed.
    """
    asked = [
        _verdict(question, answer) if answer else None
        for question, answer in zip(questions, answers, strict=True)
    ]
    distinct = list(dict.fromkeys(request for request in asked if request is not None))
    replies = judge.complete(distinct) if distinct else []
    grade = {r: _grade(reply) for r, reply in zip(distinct, replies, strict=True)}
    return np.array([0.0 if request is None else grade[request] for request in asked], np.float64)


def _grade(reply: str | EffectError) -> float:
    return float("nan") if isinstance(reply, EffectError) else float("true" in reply.lower())


def _verdict(question: Question, prediction: str) -> LLMRequest:
    gold = " | ".join(question.answers)
    values = {"question": question.text, "answers": gold, "prediction": prediction}
    return LLMRequest("judge", user_turn("judge", "judge", **values))
