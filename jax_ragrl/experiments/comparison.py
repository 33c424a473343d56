"""The comparison of the arms of an experiment: differences, intervals, tests, and a page."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.suite import markdown_table
from jax_ragrl.experiments.arms import Cell, Experiment
from jax_ragrl.experiments.measures import is_of_training, question_mask, title_of, values_of
from jax_ragrl.experiments.pairs import FAILS, HOLDS, Pair, decide
from jax_ragrl.experiments.statistics import (
    detectable_difference,
    holm,
    points,
    seed_interval,
    seed_test,
    sign_flip_test,
)
from jax_ragrl.runtime.caches import write_text
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.text.metrics import hierarchical_bootstrap

# Metrics of roles, whose means over the steps of the trainings are part of the result.
ROLE_METRICS = ("/role_gradient/", "/advantage/std/", "/valid_frac/")

Rows = Mapping[Cell, Mapping[str, Any]]  # see `run_cell`


def compare(experiment: Experiment, rows: Rows) -> dict[str, Any]:
    """Compares every arm with the baseline on the questions and seeds that both have.

    Returns:
      JSON values. `arms`: by name, the mean of each metric in percent, and the mean `totals` and
      `means` of its trainings. `comparisons`: one per metric and arm other than the baseline, with
      the mean difference in points, its 95 % interval over seeds and questions, the p-value before
      and after the adjustment for all comparisons, the smallest difference that could be seen (nan:
      unknown), and a verdict.
    """
    # All metrics and arms are one family: each is a chance to find a difference.
    comparisons = adjust_for_family(
        compare_pair(Pair(arm, experiment.baseline, metric), rows)
        for metric in experiment.metrics
        for arm in experiment.arms
        if arm != experiment.baseline
    )
    for comparison in comparisons:
        comparison["verdict"] = verdict(comparison)
    arms = {name: _arm_summary(name, experiment.metrics, rows) for name in experiment.arms}
    return {"baseline": experiment.baseline, "arms": arms, "comparisons": comparisons}


def adjust_for_family(pairs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns comparisons with `p_adjusted`, for all of them as one family."""
    comparisons = list(pairs)
    p_values = holm([comparison["p"] for comparison in comparisons])
    return [c | {"p_adjusted": p} for c, p in zip(comparisons, p_values, strict=True)]


def compare_pair(pair: Pair, rows: Rows) -> dict[str, Any]:
    """Compares two arms on the questions and seeds that both have.

    Returns the fields of one of the `comparisons` of `compare`, before the adjustment. `p` is of
    the difference that the pair's kind tests, see `Pair.boundary`.
    """
    differences = paired_differences(pair, rows)
    # Questions whose environment failed in one of the arms are NaN: they cannot be paired.
    means_S = np.array([np.nanmean(x) for x in differences.values() if np.isfinite(x).any()])
    (mean, low, high), p = seed_interval(means_S), seed_test(means_S - pair.boundary)
    # A training is one unit, however many steps it has.
    if not is_of_training(pair.metric):
        by_seeds = (low, high, p)
        mean, low, high = hierarchical_bootstrap([np.stack(x) for x in by_world(differences)])
        p = sign_flip_test(mean_by_question(differences) - pair.boundary)
        # A bootstrap of few seeds is too narrow, and sign flips of questions say nothing about
        # another training: Student's t over the seeds, which ignores that they share questions,
        # must agree.
        if len(means_S) != 1:
            low, high, p = min(low, by_seeds[0]), max(high, by_seeds[1]), max(p, by_seeds[2])
    return {
        "metric": pair.metric,
        "arm": pair.first,
        "over": pair.second,
        "cells": len(differences),
        "mean": mean,
        "ci95": [low, high],
        "detectable": detectable_difference(low, high),
        "p": p,
    }


def paired_differences(pair: Pair, rows: Rows) -> dict[tuple[int, int, int], np.ndarray]:
    """Returns the differences of two arms per question, by the seeds that both have.

    Returns:
      float64 by seeds: `[Q]`, of which questions that do not count, or whose environment failed in
      one of the arms, are NaN; `[1]` for a measure of the training.

    Raises:
      UserError: the arms share no seeds, were asked other questions, also with another seed of one
        world, or lack the metric.
    """
    by_seeds = {cell.seeds: row for cell, row in rows.items() if cell.arm == pair.second}
    pairs = {
        cell.seeds: (row, by_seeds[cell.seeds])
        for cell, row in rows.items()
        if cell.arm == pair.first and cell.seeds in by_seeds
    }
    if not pairs:
        names = f"{pair.first} and {pair.second}"
        raise UserError(f"arms {names} have no finished cell of equal seeds")
    differences, asked = {}, dict[int, str]()  # the latter by world, whose questions are paired
    for seeds, (first, second) in pairs.items():
        own = asked.setdefault(seeds[1], first["questions"])
        if not own == first["questions"] == second["questions"]:
            raise UserError(
                f"arms {pair.first} and {pair.second} answered other test questions with the seeds "
                f"{seeds}: give all cells of a world the same data"
            )
        baseline_Q = values_of(second, pair.second_metric or pair.metric)
        difference_Q = values_of(first, pair.metric) - baseline_Q
        differences[seeds] = np.where(question_mask(first, pair.among), difference_Q, np.nan)
    return differences


def mean_by_question(differences: Mapping[tuple[int, int, int], np.ndarray]) -> np.ndarray:
    """Returns the mean difference of each question over training and warm-start seeds."""
    means_Q = np.concatenate([np.mean(x, axis=0) for x in by_world(differences)])
    return means_Q[np.isfinite(means_Q)]


def by_world(differences: Mapping[tuple[int, int, int], np.ndarray]) -> list[list[np.ndarray]]:
    """Returns the differences of the seeds of each world, which answer the same questions."""
    worlds: dict[int, list[np.ndarray]] = {}
    for (_, world, _), x_Q in differences.items():
        worlds.setdefault(world, []).append(x_Q)
    return list(worlds.values())


def verdict(comparison: Mapping[str, Any]) -> str:
    """Returns the verdict of a comparison: `higher`, `lower` or `undecided`, see `decide`."""
    undecided = f"undecided (could be seen: {points(comparison['detectable'])})"
    # The rule of a claim that the arm is higher.
    decision = decide(Pair(comparison["arm"], comparison["over"]), comparison)
    return {HOLDS: "higher", FAILS: "lower"}.get(decision, undecided)


def _arm_summary(arm: str, metrics: Sequence[str], rows: Rows) -> dict[str, Any]:
    # An arm counts with all its cells, also with those that have no partner.
    own = [row for cell, row in rows.items() if cell.arm == arm]
    names = sorted({name for row in own for name in row["totals"]})
    totals = {
        name: round(float(np.mean([r["totals"].get(name, 0) for r in own])), 1) for name in names
    }
    scores = {
        metric: round(float(np.mean([np.nanmean(values_of(row, metric)) for row in own])), 2)
        for metric in metrics
    }
    values: dict[str, list[float]] = {}
    for row in own:
        for name, x in row.get("training", {}).items():
            # Runs with several policies have the name of the policy before that of the metric.
            if any(part in f"/{name}" for part in ROLE_METRICS):
                values.setdefault(name, []).append(x)
    means = {name: round(float(np.mean(xs)), 4) for name, xs in values.items()}
    return {"cells": len(own), "scores": scores, "totals": totals, "means": means}


def write_comparison(experiment: Experiment, rows: Rows, out: pathlib.Path) -> str:
    """Compares the arms; writes `experiment.json` and `experiment.md`, which it returns."""
    result = compare(experiment, rows)
    write_json(out / "experiment.json", result)
    text = page(result)
    write_text(out / "experiment.md", text)
    return text


def page(result: Mapping[str, Any]) -> str:
    """Renders a comparison as Markdown."""
    arms, comparisons = result["arms"], result["comparisons"]
    metrics = list(next(iter(arms.values()))["scores"])
    totals = list(dict.fromkeys(name for arm in arms.values() for name in arm["totals"]))
    titles = [title_of(metric) for metric in metrics]
    arm_rows = [
        (name, arm["cells"], *arm["scores"].values(), *(arm["totals"].get(t, "") for t in totals))
        for name, arm in arms.items()
    ]
    rows = [
        (
            title_of(c["metric"]),
            f"{c['arm']} over {c['over']}",
            f"{c['mean']:+.2f}",
            "{:.2f} to {:.2f}".format(*c["ci95"]),
            f"{c['p_adjusted']:.5f}",
            c["verdict"],
        )
        for c in comparisons
    ]
    first = markdown_table(("arm", "cells", *titles, *totals), arm_rows)
    second = markdown_table(
        ("metric", "difference", "points", "95 %, seeds and questions", "p, adjusted", "verdict"),
        rows,
    )
    return f"{first}\n{second}"
