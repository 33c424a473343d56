"""Rewards that several systems share: pure functions of a forest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jax_ragrl.rollout.tree import Forest


def answer_rewards(forest: Forest, metric: Callable[[str, Sequence[str]], float]) -> np.ndarray:
    """float32 `[N]`: the score of each leaf's answer against the gold ones; 0 elsewhere."""
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N & ~forest.dead_N).tolist():
        record = forest.records[leaf]
        assert record.answer is not None, "a leaf without an answer is dead"
        reward_N[leaf] = metric(record.answer, forest.questions[record.question].answers)
    return reward_N
