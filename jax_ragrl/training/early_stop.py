"""Early stop: a run ends when its score on dev questions no longer improves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

SCORE, STANDARD_ERROR = "eval/accuracy", "eval/standard_error"


def evaluations_without_gain(rows: Iterable[Mapping[str, Any]]) -> int:
    """Returns the number of evaluations since the one with the best score.

    Args:
      rows: the rows of `metrics.jsonl`, in order. An evaluation without a score (null or nan) is
        left out: it says nothing about the policies.
    """
    # An equal score is no gain, so that the best checkpoint is the first one with its score.
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
      rows: the rows of `metrics.jsonl` before.
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


def reason_to_end(rows: Iterable[Mapping[str, Any]], patience: int) -> str:
    """Returns why a run ends before its last step; empty if it continues.

    A function of the log alone, so that a resumed run ends at the same step.

    Args:
      rows: the rows of `metrics.jsonl` so far.
      patience: evaluations without a better score after which the run ends; 0: it never does.
    """
    if not patience or evaluations_without_gain(rows) < patience:
        return ""
    return (
        f"early stop: {patience} evaluations (run.patience) without a better score on dev "
        "questions; RUN@best has the best policies"
    )
