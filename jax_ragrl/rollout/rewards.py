"""Rewards that several systems share: pure functions of a forest; the check of any reward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.types import Question

# From an answer and the gold answers to a score from 0 to 1.
AnswerMetric = Callable[[str, Sequence[str]], float]


def finite_number(value: Any, function: Callable[..., Any], question: Question) -> float:
    """Returns the value that a reward or metric returned for a question as a float.

    Raises:
      UserError: the value is no number, or not a finite float32.
    """
    try:
        if value is None or isinstance(value, str | bytes):
            raise TypeError
        with np.errstate(over="ignore"):
            if np.isfinite(np.float32(number := float(value))):
                return number
    except (TypeError, ValueError, OverflowError):
        pass
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", "")
    # Python refuses to write integers of more than 4,300 digits.
    shown = "an integer that is too large" if isinstance(value, int) else f"{value!r:.200}"
    raise UserError(
        f"{module}.{name} returned {shown} for question {question.id!r} "
        f"({question.text!r:.200}): a reward or metric must be a finite number, since one that is "
        "not makes the advantages of the whole batch undefined. Return a number in every case, for "
        "example 0.0 for an answer that cannot be scored"
    )


def rewards_of(reward: Callable[[Forest], np.ndarray], forest: Forest) -> np.ndarray:
    """Returns the reward of each node by the reward of a recipe, float32 `[N]`.

    Raises:
      UserError: there is not one finite number per node.
    """
    values = reward(forest)
    if np.shape(values) != (len(forest.records),):
        raise UserError(
            f"the reward of the recipe has the shape {np.shape(values)} for {len(forest.records)} "
            "nodes: return one number per node of the forest, 0 at nodes without a reward"
        )
    rows = zip(values, forest.records, strict=True)
    numbers = [finite_number(x, reward, forest.questions[r.question]) for x, r in rows]
    return np.array(numbers, np.float32)


def leaf_rewards(reward: Callable[[Question, str], float], forest: Forest) -> np.ndarray:
    """Returns `reward(question, answer)` of each leaf, float32 `[N]`; 0 at all other nodes.

    A leaf without an answer has 0 as well.
    """
    return _of_answers(forest, reward, lambda question, leaf: reward(question, leaf.answer or ""))


def answer_rewards(forest: Forest, metric: AnswerMetric) -> np.ndarray:
    """Returns the score of each leaf's answer, float32 `[N]`; 0 at all other nodes.

    `metric` compares the answer with the gold answers. If a judge graded the answer, the verdict of
    the judge replaces the metric.
    """

    def score(question: Question, leaf: Record) -> float:
        if leaf.verdict is not None:
            return leaf.verdict
        return metric(leaf.answer or "", question.answers)

    return _of_answers(forest, metric, score)


def _of_answers(
    forest: Forest, function: Callable[..., Any], score: Callable[[Question, Record], float]
) -> np.ndarray:
    """Returns the scores of answers; `function` is named in the error of a wrong one."""
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N & ~forest.unanswered_N).tolist():
        question = forest.questions[forest.records[leaf].question]
        reward_N[leaf] = finite_number(score(question, forest.records[leaf]), function, question)
    return reward_N
