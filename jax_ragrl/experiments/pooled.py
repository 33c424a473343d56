"""The trials of a system over all seeds: means, deviations, and one interval per metric."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.run.evaluate import METRIC_NAMES
from jax_ragrl.text.metrics import hierarchical_bootstrap

METRICS = ("f1", "em", "cover_em", "judge")
COLUMNS = ("system", "metric", "seeds", "warm start", "trained", "sd", "gain", "95 %")
# Scores per question by metric; None or nan for questions on which the environment failed.
Scores = dict[str, list[float]]


class Pair(NamedTuple):
    """Scores of two policies on the same questions of one seed."""

    before: Scores
    after: Scores


def pooled_rows(
    system: str, folders: Sequence[pathlib.Path], baseline: pathlib.Path | None = None
) -> list[tuple[Any, ...]]:
    """Returns a row of `COLUMNS` per metric, over the trials whose files hold scores.

    Args:
      system: the name of the system.
      folders: the folders of its trials, one per seed.
      baseline: the folder of other trials of the same names. Each row then also has the gain over
        them, with its interval.
    """
    trials = [(folder, pair) for folder in folders if (pair := load_pair(folder)) is not None]
    rows: list[tuple[Any, ...]] = []
    for metric in METRICS:
        scored_trials = [(f, p) for f, p in trials if metric in p.before and metric in p.after]
        if not scored_trials:
            continue
        pairs = [(pair.before[metric], pair.after[metric]) for _, pair in scored_trials]
        row = (system, METRIC_NAMES.get(metric, metric), len(scored_trials), *pooled_gain(pairs))
        if baseline is None:
            rows.append(row)
            continue
        others = [trained_scores(baseline / folder.name)[metric] for folder, _ in scored_trials]
        score_pairs = zip(others, (after for _, after in pairs), strict=True)
        *_, gain, interval = pooled_gain([*score_pairs])
        rows.append((*row, f"{gain}, {interval}"))
    return rows


def load_pair(folder: pathlib.Path) -> Pair | None:
    """Returns the scores of the warm start and of the trained policy; None if they are missing."""
    baselines = folder / "baselines.json"
    if not baselines.is_file() or not (folder / "trained.json").is_file():
        return None
    before = json.loads(baselines.read_text(encoding="utf-8"))["warm_start"]["scores"]
    return Pair(before, trained_scores(folder))


def trained_scores(folder: pathlib.Path) -> Scores:
    """Returns the scores of the trained policy of a trial."""
    row = json.loads((folder / "trained.json").read_text(encoding="utf-8"))
    scores: Scores = row["scores"]
    return scores


def pooled_gain(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[float, float, float | str, float, str]:
    """Returns means over seeds, in percent: before, after, its deviation, the gain, the interval.

    A seed counts with its own mean, whatever its number of questions. The interval of the gain
    resamples seeds, and questions within each seed. With one seed there is no deviation, and the
    interval is that of its questions.

    Args:
      pairs: scores before and after of each seed, in the order of its questions. Only questions
        with both scores count.
    """
    arrays = [(np.array(a, np.float64), np.array(b, np.float64)) for a, b in pairs]
    finite = [(a[ok], b[ok]) for a, b in arrays if (ok := np.isfinite(a) & np.isfinite(b)).any()]
    before_S, after_S = (np.array([100 * pair[i].mean() for pair in finite]) for i in (0, 1))
    gain, low, high = hierarchical_bootstrap([100 * (b - a) for a, b in finite])
    deviation = round(float(after_S.std(ddof=1)), 2) if len(finite) > 1 else ""
    means = (round(float(x_S.mean()), 2) for x_S in (before_S, after_S))
    return (*means, deviation, round(gain, 2), f"{low:.2f} to {high:.2f}")  # type: ignore[return-value]
