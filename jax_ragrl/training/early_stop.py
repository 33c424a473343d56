"""Early stop: a run ends when its score no longer improves, or when its tokens are spent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

SCORE, STANDARD_ERROR = "eval/accuracy", "eval/standard_error"


class Scores:
    """The scores on dev questions and the tokens of a run, from its rows of `metrics.jsonl`.

    A function of the log alone, so that a resumed run ends at the same step. An evaluation without
    a score (null or nan) is left out: it says nothing about the policies.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        self.policy_tokens, self.without_gain = 0.0, 0
        self._best, self._error = -math.inf, math.nan
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        self.policy_tokens += row.get("policy_tokens") or 0
        score, error = _score_of(row)
        # An equal score is not a gain, so that the best checkpoint is the first one with its score.
        if score > self._best:
            self._best, self._error, self.without_gain = score, error, 0
        elif math.isfinite(score):
            self.without_gain += 1

    def drop(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Returns how far a score is below the best one, in standard errors: `eval/drop`.

        Both evaluations have the same questions, so that their difference is less noisy than this
        number takes it to be.
        """
        score, own_error = _score_of(metrics)
        error = math.hypot(self._error, own_error)
        number = (self._best - score) / error if error else math.nan
        # All questions right, or all wrong, in both evaluations say nothing of their noise.
        return {"eval/drop": number} if math.isfinite(number) else {}

    def is_spent(self, budget: int, metrics: Mapping[str, Any]) -> bool:
        """Whether the rows and the metrics of a further step reach `run.token_budget`; 0: none."""
        return 0 < budget <= self.policy_tokens + (metrics.get("policy_tokens") or 0)

    def reason_to_end(self, patience: int, budget: int = 0) -> str:
        """Returns why a run ends before its last step; empty if it continues.

        It ends after `patience` evaluations without a better score, 0: never; or see `is_spent`.
        """
        if self.is_spent(budget, {}):
            return f"the run has spent its {budget} tokens (run.token_budget)"
        if not patience or self.without_gain < patience:
            return ""
        return (
            f"early stop: {patience} evaluations (run.patience) without a better score on dev "
            "questions; RUN@best has the best policies"
        )


def _score_of(row: Mapping[str, Any]) -> tuple[float, float]:
    score, error = (row.get(name) for name in (SCORE, STANDARD_ERROR))
    return math.nan if score is None else score, math.nan if error is None else error
