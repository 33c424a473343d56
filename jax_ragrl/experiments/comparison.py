"""The comparison of the arms of an experiment: differences, intervals, tests, and a page."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.experiments.arms import Cell, Experiment
from jax_ragrl.experiments.seeds import markdown
from jax_ragrl.experiments.statistics import detectable_difference, holm, sign_flip_test
from jax_ragrl.run.evaluate import METRIC_NAMES
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.text.metrics import hierarchical_bootstrap

Rows = Mapping[Cell, Mapping[str, Any]]  # see `run_cell`
LEVEL = 0.05


def compare(experiment: Experiment, rows: Rows) -> dict[str, Any]:
    """Compares every arm with the baseline on the questions and seeds that both have.

    Args:
      experiment: the arms and metrics.
      rows: the rows of all cells.

    Returns:
      JSON values. `arms`: by name, the mean of each metric in percent, and the mean `totals` and
      `means` of its trainings. `comparisons`: one per metric and arm other than the baseline, with
      the mean difference in points, its 95 % interval over seeds and questions, the p-value before
      and after the adjustment for all comparisons, the smallest difference that could be seen, and
      a verdict.

    Raises:
      UserError: arms were asked different questions.
    """
    # All metrics and arms are one family: each is a chance to find a difference.
    comparisons = decide_pairs(
        compare_pair(experiment.baseline, arm, metric, rows)
        for metric in experiment.metrics
        for arm in experiment.arms
        if arm != experiment.baseline
    )
    arms = {name: _arm_summary(name, experiment.metrics, rows) for name in experiment.arms}
    return {"baseline": experiment.baseline, "arms": arms, "comparisons": comparisons}


def decide_pairs(pairs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns comparisons with `p_adjusted`, for all of them as one family, and `verdict`.

    Args:
      pairs: see `compare_pair`.
    """
    comparisons = list(pairs)
    p_values = holm([comparison["p"] for comparison in comparisons])
    for comparison, p in zip(comparisons, p_values, strict=True):
        comparison["p_adjusted"] = round(p, 5)
        comparison["verdict"] = verdict(comparison)
    return comparisons


def compare_pair(baseline: str, arm: str, metric: str, rows: Rows) -> dict[str, Any]:
    """Compares two arms on the questions and seeds that both have.

    Args:
      baseline: the name of the arm that is subtracted.
      arm: the name of the other arm.
      metric: a name in the scores of the rows.
      rows: the rows of all cells.

    Returns:
      The fields of one of the `comparisons` of `compare`, before the adjustment.

    Raises:
      UserError: as in `paired_differences`.
    """
    differences = paired_differences(baseline, arm, metric, rows)
    # Questions whose environment failed in one of the arms cannot be paired.
    finite = [100 * x_Q[np.isfinite(x_Q)] for x_Q in differences.values()]
    mean, low, high = hierarchical_bootstrap(finite)
    return {
        "metric": metric,
        "arm": arm,
        "over": baseline,
        "cells": len(differences),
        "mean": round(mean, 2),
        "ci95": [round(low, 2), round(high, 2)],
        "detectable": round(detectable_difference(low, high), 2),
        "p": round(sign_flip_test(mean_by_question(differences)), 5),
    }


def paired_differences(
    baseline: str, arm: str, metric: str, rows: Rows
) -> dict[tuple[int, int, int], np.ndarray]:
    """Returns the differences of two arms per question, by the seeds that both have.

    Args:
      baseline: the name of the arm that is subtracted.
      arm: the name of the other arm.
      metric: a name in the scores of the rows.
      rows: the rows of all cells.

    Returns:
      float64 `[Q]` by seeds; questions whose environment failed in one of the arms are NaN.

    Raises:
      UserError: the arms share no seeds, were asked other questions, or lack the metric.
    """
    by_seeds = {cell.seeds: row for cell, row in rows.items() if cell.arm == baseline}
    pairs = {
        cell.seeds: (by_seeds[cell.seeds], row)
        for cell, row in rows.items()
        if cell.arm == arm and cell.seeds in by_seeds
    }
    if not pairs:
        raise UserError(f"arms {arm} and {baseline} have no finished cell of equal seeds")
    for seeds, (first, second) in pairs.items():
        if first["questions"] != second["questions"]:
            raise UserError(
                f"arms {arm} and {baseline} answered other test questions with the seeds {seeds}: "
                "give both the same data"
            )
    return {seeds: _scores(b, metric) - _scores(a, metric) for seeds, (a, b) in pairs.items()}


def _scores(row: Mapping[str, Any], metric: str) -> np.ndarray:
    if metric not in row["scores"]:
        raise UserError(f"there is no metric {metric!r}: use one of {', '.join(row['scores'])}")
    return np.array(row["scores"][metric], np.float64)  # None becomes NaN


def mean_by_question(differences: Mapping[tuple[int, int, int], np.ndarray]) -> np.ndarray:
    """Returns the mean difference of each question over training and warm-start seeds.

    Worlds have different questions, which are separate units.

    Args:
      differences: see `paired_differences`.
    """
    worlds: dict[int, list[np.ndarray]] = {}
    for (_, world, _), x_Q in differences.items():
        worlds.setdefault(world, []).append(x_Q)
    means_Q = np.concatenate([np.mean(x, axis=0) for x in worlds.values()])
    return means_Q[np.isfinite(means_Q)]


def verdict(comparison: Mapping[str, Any]) -> str:
    """Returns the verdict of a comparison: `higher`, `lower` or `undecided`.

    Both the interval over seeds and questions and the adjusted test must exclude 0.
    """
    low, high = comparison["ci95"]
    if comparison["p_adjusted"] >= LEVEL or low <= 0 <= high:
        return f"undecided (a difference of {comparison['detectable']} points could be seen)"
    return "higher" if low > 0 else "lower"


def _arm_summary(arm: str, metrics: Sequence[str], rows: Rows) -> dict[str, Any]:
    # An arm counts with all its cells, also with those that have no partner.
    own = [row for cell, row in rows.items() if cell.arm == arm]
    names = sorted({name for row in own for name in row["totals"]})
    totals = {
        name: round(float(np.mean([r["totals"].get(name, 0) for r in own])), 1) for name in names
    }
    scores = {
        metric: round(100 * float(np.mean([np.nanmean(_scores(row, metric)) for row in own])), 2)
        for metric in metrics
    }
    return {"cells": len(own), "scores": scores, "totals": totals, "means": _mean_of_means(own)}


def _mean_of_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean of each of the `means` over the cells that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, x in row.get("means", {}).items():
            values.setdefault(name, []).append(x)
    return {name: round(float(np.mean(xs)), 4) for name, xs in values.items()}


def write_comparison(experiment: Experiment, rows: Rows, out: pathlib.Path) -> str:
    """Compares the arms; writes `experiment.json` and `experiment.md`.

    Args:
      experiment: the arms and metrics.
      rows: the rows of all cells.
      out: the folder of the experiment.

    Returns:
      The page in Markdown.
    """
    result = compare(experiment, rows)
    write_json(out / "experiment.json", result)
    text = page(result)
    (out / "experiment.md").write_text(text, encoding="utf-8")
    return text


def page(result: Mapping[str, Any]) -> str:
    """Renders a comparison as Markdown.

    Args:
      result: the result of `compare`.
    """
    arms, comparisons = result["arms"], result["comparisons"]
    metrics = list(next(iter(arms.values()))["scores"])
    totals = list(dict.fromkeys(name for arm in arms.values() for name in arm["totals"]))
    titles = [METRIC_NAMES.get(metric, metric) for metric in metrics]
    arm_rows = [
        (name, arm["cells"], *arm["scores"].values(), *(arm["totals"].get(t, "") for t in totals))
        for name, arm in arms.items()
    ]
    rows = [
        (
            METRIC_NAMES.get(c["metric"], c["metric"]),
            f"{c['arm']} over {c['over']}",
            f"{c['mean']:+.2f}",
            f"{c['ci95'][0]} to {c['ci95'][1]}",
            c["p_adjusted"],
            c["verdict"],
        )
        for c in comparisons
    ]
    first = markdown(("arm", "cells", *titles, *totals), arm_rows)
    second = markdown(
        ("metric", "difference", "points", "95 %, seeds and questions", "p, adjusted", "verdict"),
        rows,
    )
    return f"{first}\n{second}"
