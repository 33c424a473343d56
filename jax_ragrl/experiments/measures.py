"""Measures of the finished cells of an experiment: what arms can be compared by.

A measure has one number per test question, from the scores and predictions of a cell:

  f1, em, cover_em, judge, ...     a score, in points
  retrieval_calls, policy_tokens, llm_calls, policy_calls, ...   a cost, see `rollout.costs`
  malformed             malformed actions
  strategy=NAME         whether the system took a strategy, in points
  mistake=KIND          whether the answer has a kind of mistake (`run.mistakes`), in points

or one number per training:

  training:METRIC       the mean of a metric over the steps of the training; fractions in points
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.costs import COSTS
from jax_ragrl.run.metric_names import metric_of
from jax_ragrl.run.mistakes import KINDS, mistake_of
from jax_ragrl.run.predictions import FOLDER
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.text.metrics import METRIC_NAMES, METRICS

FAULTS, STRATEGY, MISTAKE, TRAINING = "malformed", "strategy", "mistake", "training:"
NAMES = (*METRICS, "judge", *COSTS, FAULTS, *(f"{MISTAKE}={kind}" for kind in KINDS))


def check_measure(measure: str) -> None:
    """Raises `UserError` for a name that no cell has; a cell may lack others (`values_of`)."""
    if is_of_training(measure):
        known = metric_of(measure.removeprefix(TRAINING)) is not None
    else:
        known = measure in NAMES or measure.startswith(f"{STRATEGY}=")
    if not known:
        forms = ", ".join([*NAMES, f"{STRATEGY}=NAME", f"{TRAINING}METRIC of metrics.jsonl"])
        raise UserError(f"there is no metric {measure!r}: use one of {forms}")


def with_facts(row: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Returns the row of a cell with facts from the other files of its folder.

    These are `facts`, one per question (see `facts_of`), and `training`: the mean of each metric
    over the steps; both are empty if there are no such files.
    """
    # Only facts are kept: the traces of all cells together would fill the memory.
    predictions = read_rows(folder / FOLDER / "test.jsonl")
    means = training_means(folder / "metrics.jsonl")
    return {**row, "facts": [facts_of(p) for p in predictions], "training": means}


def facts_of(prediction: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what measures and filters need of a prediction; `None` for an unknown number."""
    has_failed = prediction["finish_reason"] == "failed"
    return {
        # Text, as in the filters of claims.
        "hops": str(prediction["hops"]),
        "kind": prediction["kind"],
        "failed": has_failed,
        **prediction["costs"],
        FAULTS: None if has_failed else float(len(prediction["faults"])),
        STRATEGY: prediction["strategy"] or "",
        MISTAKE: mistake_of(prediction),
    }


def training_means(file: pathlib.Path) -> dict[str, float]:
    """Returns the mean of each metric over the steps of a training that have it."""
    values: dict[str, list[float]] = {}
    for row in read_rows(file):
        for name, x in row.items():
            if isinstance(x, int | float) and math.isfinite(x):
                values.setdefault(name, []).append(float(x))
    return {name: float(np.mean(x)) for name, x in values.items()}


def is_of_training(measure: str) -> bool:
    """Returns whether a measure has one number per training, not per question."""
    return measure.startswith(TRAINING)


def is_in_points(measure: str) -> bool:
    """Returns whether a measure is a score, a share of questions or a fraction of a training."""
    if is_of_training(measure):
        return _is_fraction(measure.removeprefix(TRAINING))
    return measure in METRIC_NAMES or measure.partition("=")[0] in (STRATEGY, MISTAKE)


def _is_fraction(metric: str) -> bool:
    entry = metric_of(metric)
    return entry is not None and entry.unit == "fraction"


def title_of(measure: str) -> str:
    """Returns the name of a measure for a table."""
    return METRIC_NAMES.get(measure, measure)


def values_of(row: Mapping[str, Any], measure: str) -> np.ndarray:
    """Returns a measure of a cell; `UserError` if it has none.

    float64 `[Q]`, NaN for questions on which the environment failed; `[1]` for a measure of the
    training.
    """
    if measure in row["scores"]:
        return 100 * np.array(row["scores"][measure], np.float64)  # None becomes NaN
    if is_of_training(measure):
        metric, means = measure.removeprefix(TRAINING), row.get("training", {})
        if metric not in means:
            raise UserError(
                f"the training has no metric {metric!r}: use one of metrics.jsonl, such as "
                f"{', '.join(sorted(means)[:5]) or 'none of this arm, which shares a training'}"
            )
        # Differences are rounded to hundredths, which would hide differences of fractions.
        return np.array([means[metric] * (100 if _is_fraction(metric) else 1)])
    facts, (name, equals, value) = row.get("facts", []), measure.partition("=")
    if equals and name in (STRATEGY, MISTAKE):
        return np.array([np.nan if f["failed"] else 100.0 * (f[name] == value) for f in facts])
    # Costs and counts, which are numbers or unknown.
    first = facts[0] if facts else {}
    numbers = [name for name, x in first.items() if x is None or type(x) is float]
    if measure in numbers:
        return np.array([fact[measure] for fact in facts], np.float64)
    names = sorted({*row["scores"], *numbers})
    raise UserError(f"there is no metric {measure!r}: use one of {', '.join(names)}")


def question_mask(row: Mapping[str, Any], among: str) -> np.ndarray:
    """Returns which questions of a cell (see `with_facts`) count, bool `[Q]`.

    `among` is `hops=1,2` or `kind=NAME`, or empty for all. `UserError` if it is none of them.
    """
    if not among:
        return np.array(True)
    name, _, values = among.partition("=")
    if name not in ("hops", "kind"):
        raise UserError(f"among is {among!r}: use hops=NUMBER[,NUMBER...] or kind=NAME")
    chosen_Q = np.array([fact[name] in values.split(",") for fact in row.get("facts", [])])
    if not chosen_Q.any():
        raise UserError(f"no test question has {among}")
    return chosen_Q
