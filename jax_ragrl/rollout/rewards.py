"""Rewards that several systems share: pure functions of a forest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jax_ragrl.rollout.tree import Forest


def answer_rewards(forest: Forest, metric: Callable[[str, Sequence[str]], float]) -> np.ndarray:
    """float32 `[N]`: the score of each leaf's answer against the gold ones; 0 elsewhere.

    Where there is a judge its verdict stands in the place of the metric.
    """
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N & ~forest.dead_N).tolist():
        record = forest.records[leaf]
        assert record.answer is not None, "a leaf without an answer is dead"
        gold = forest.questions[record.question].answers
        verdict = record.verdict
        reward_N[leaf] = metric(record.answer, gold) if verdict is None else verdict
    return reward_N
