"""Early stop: a run ends when its score no longer improves, or when its tokens are spent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

SCORE, STANDARD_ERROR = "eval/accuracy", "eval/standard_error"


class Scores(list[dict[str, Any]]):
    """The scores of the rows that have one, with their errors, and the tokens of all rows.

    The rows of a long run hold a hundred numbers per step, which would grow without end.

    Attributes:
      policy_tokens: the tokens of all actions of the run so far.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]):
        super().__init__()
        self.policy_tokens = 0.0
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends the score of a row, if the row has one, and counts its tokens."""
        self.policy_tokens += tokens_of(row)
        if row.get(SCORE) is not None:
            super().append({key: row.get(key) for key in (SCORE, STANDARD_ERROR)})


def tokens_of(row: Mapping[str, Any]) -> float:
    """Returns the tokens of all actions of a step; 0 for rows without rollouts."""
    return float(row.get("policy_tokens") or 0)


def is_spent(rows: Scores, metrics: Mapping[str, Any], budget: int) -> bool:
    """Whether a run has spent its tokens.

    Args:
      rows: the steps before.
      metrics: the metrics of the newest step, which is not among them; empty: no further step.
      budget: the tokens of all actions of the run (`run.token_budget`); 0: no budget.
    """
    return 0 < budget <= rows.policy_tokens + tokens_of(metrics)


def evaluations_without_gain(rows: Iterable[Mapping[str, Any]]) -> int:
    """Returns the number of evaluations since the one with the best score.

    Args:
      rows: the rows of `metrics.jsonl`, or their `Scores`, in order. An evaluation without a score
        (null or nan) is left out: it says nothing about the policies.
    """
    # An equal score is not a gain, so that the best checkpoint is the first one with its score.
    best, count = -math.inf, 0
    for score in (row.get(SCORE) for row in rows):
        if score is not None and math.isfinite(score):
            count = 0 if score > best else count + 1
            best = max(best, score)
    return count


def drop(rows: Iterable[Mapping[str, Any]], metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns how far the score is below the best one so far, in standard errors: `eval/drop`.

    Both evaluations have the same questions, so that their difference is less noisy than this
    number takes it to be.

    Args:
      rows: the rows of `metrics.jsonl` before, or their `Scores`.
      metrics: the score and its standard error.
    """
    scored = [row for row in rows if _has_error(row)]
    if not scored or not _has_error(metrics):
        return {}
    best = max(scored, key=lambda row: row[SCORE])
    error = math.hypot(best[STANDARD_ERROR], metrics[STANDARD_ERROR])
    # All questions right, or all wrong, in both evaluations: the scores say nothing of their noise.
    return {"eval/drop": (best[SCORE] - metrics[SCORE]) / error} if error else {}


def _has_error(row: Mapping[str, Any]) -> bool:
    values = row.get(SCORE), row.get(STANDARD_ERROR)
    return all(value is not None and math.isfinite(value) for value in values)


def reason_to_end(rows: Scores, patience: int, budget: int = 0) -> str:
    """Returns why a run ends before its last step; empty if it continues.

    A function of the log alone, so that a resumed run ends at the same step.

    Args:
      rows: the rows of `metrics.jsonl` so far.
      patience: evaluations without a better score after which the run ends; 0: it never does.
      budget: see `is_spent`.
    """
    if is_spent(rows, {}, budget):
        return f"the run has spent its {budget} tokens (run.token_budget)"
    if not patience or evaluations_without_gain(rows) < patience:
        return ""
    return (
        f"early stop: {patience} evaluations (run.patience) without a better score on dev "
        "questions; RUN@best has the best policies"
    )
