"""Rewards that several systems share: pure functions of a forest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jax_ragrl.rollout.tree import Forest
from jax_ragrl.types import Question

# From an answer and the gold answers to a score from 0 to 1.
AnswerMetric = Callable[[str, Sequence[str]], float]


def leaf_rewards(reward: Callable[[Question, str], float], forest: Forest) -> np.ndarray:
    """Returns `reward(question, answer)` of each leaf, float32 `[N]`; 0 at all other nodes.

    A leaf without an answer has 0 as well.
    """
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N & ~forest.unanswered_N).tolist():
        record = forest.records[leaf]
        assert record.answer is not None, "unanswered_N excludes leaves without an answer"
        reward_N[leaf] = reward(forest.questions[record.question], record.answer)
    return reward_N


def answer_rewards(forest: Forest, metric: AnswerMetric) -> np.ndarray:
    """Returns the score of each leaf's answer, float32 `[N]`; 0 at all other nodes.

    `metric` compares the answer with the gold answers. If a judge graded the answer, the verdict of
    the judge replaces the metric.
    """
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N & ~forest.unanswered_N).tolist():
        record = forest.records[leaf]
        assert record.answer is not None, "unanswered_N excludes leaves without an answer"
        # The judge has compared the answer with the gold answers already.
        gold = forest.questions[record.question].answers
        verdict = record.verdict
        reward_N[leaf] = metric(record.answer, gold) if verdict is None else verdict
    return reward_N
