"""The trials of a system over all seeds: means, deviations, and one interval per metric."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.text.metrics import METRIC_NAMES, hierarchical_bootstrap

METRICS = ("f1", "em", "cover_em", "judge")
COLUMNS = ("system", "metric", "seeds", "warm start", "trained", "sd", "gain", "95 %")
# Scores per question by metric; None or nan for questions on which the environment failed.
Scores = dict[str, list[float]]


class Pair(NamedTuple):
    """Scores of two policies on the questions of one seed, whose fingerprint is `questions`."""

    before: Scores
    after: Scores
    questions: str


def pooled_rows(
    system: str, folders: Sequence[pathlib.Path], baseline: pathlib.Path | None = None
) -> list[tuple[Any, ...]]:
    """Returns a row of `COLUMNS` per metric, over the trials whose files hold scores.

    Args:
      system: the name of the system.
      folders: the folders of its trials, one per seed.
      baseline: the folder of other trials of the same names. Each row then also has the gain over
        them, with its interval; empty for a metric that they lack.
    """
    trials = [(folder, pair) for folder in folders if (pair := load_pair(folder)) is not None]
    rows: list[tuple[Any, ...]] = []
    for metric in METRICS:
        scored_trials = [(f, p) for f, p in trials if metric in p.before and metric in p.after]
        if not scored_trials:
            continue
        questions = [pair.questions for _, pair in scored_trials]
        pairs = [(pair.before[metric], pair.after[metric]) for _, pair in scored_trials]
        row = (system, METRIC_NAMES.get(metric, metric), len(pairs), *pooled_gain(pairs, questions))
        rows.append(row if baseline is None else (*row, gain_over(baseline, metric, scored_trials)))
    return rows


def gain_over(
    baseline: pathlib.Path, metric: str, trials: Sequence[tuple[pathlib.Path, Pair]]
) -> str:
    """Returns the gain over other trials with its interval; empty if one of them lacks the metric.

    Args:
      baseline: the folder of the other trials.
      metric: a metric of `METRICS`.
      trials: the folder and the scores of each trial.
    """
    others = [trained_row(baseline / folder.name)["scores"] for folder, _ in trials]
    # The baseline may have been run without a judge.
    if not all(metric in scores for scores in others):
        return ""
    pairs = [(s[metric], pair.after[metric]) for s, (_, pair) in zip(others, trials, strict=True)]
    *_, gain, interval = pooled_gain(pairs, [pair.questions for _, pair in trials])
    return f"{gain}, {interval}"


def load_pair(folder: pathlib.Path) -> Pair | None:
    """Returns the scores of the warm start and of the trained policy; None if they are missing."""
    baselines = folder / "baselines.json"
    if not baselines.is_file() or not (folder / "trained.json").is_file():
        return None
    before = json.loads(baselines.read_text(encoding="utf-8"))["warm_start"]["scores"]
    row = trained_row(folder)
    return Pair(before, row["scores"], row["asked"])


def trained_row(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the row of the trained policy of a trial: `scores`, and `asked`."""
    row: dict[str, Any] = json.loads((folder / "trained.json").read_text(encoding="utf-8"))
    return row


def pooled_gain(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], questions: Sequence[str]
) -> tuple[float, float, float | str, float, str]:
    """Returns means over seeds, in percent: before, after, its deviation, the gain, the interval.

    A seed counts with its own mean, whatever its number of questions. The interval of the gain
    resamples seeds and questions (`hierarchical_bootstrap`). With one seed there is no deviation,
    and the interval is that of its questions.

    Args:
      pairs: scores before and after of each seed, in the order of its questions. Only questions
        with both scores count.
      questions: the fingerprint of each seed's questions; seeds may share their questions.
    """
    before_S, after_S, differences = list[float](), list[float](), dict[str, list[np.ndarray]]()
    for pair, name in zip(pairs, questions, strict=True):
        both_2Q = 100 * np.array(pair, np.float64)
        both_2Q[:, ~np.isfinite(both_2Q).all(axis=0)] = np.nan
        if not np.isnan(both_2Q).all():
            before_S.append(float(np.nanmean(both_2Q[0])))
            after_S.append(float(np.nanmean(both_2Q[1])))
            differences.setdefault(name, []).append(both_2Q[1] - both_2Q[0])
    gain, low, high = hierarchical_bootstrap([np.stack(x) for x in differences.values()])
    deviation = round(float(np.std(after_S, ddof=1)), 2) if len(after_S) > 1 else ""
    means = (round(float(np.mean(x_S)), 2) for x_S in (before_S, after_S))
    return (*means, deviation, round(gain, 2), f"{low:.2f} to {high:.2f}")  # type: ignore[return-value]
