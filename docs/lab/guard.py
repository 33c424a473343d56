"""Replays the guard over the logs of finished runs: which collapses it sees, and which it imagines.

    python docs/lab/guard.py --collapsed RUN ... --healthy RUN ... [--thresholds kl=0.5 ...]

Thresholds are learned in this way: from runs that collapsed and runs that did not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.run.guards import Guard
from jax_ragrl.run.indicators import (
    INDICATORS,
    History,
    Incident,
    applies,
    is_beyond,
    number_of,
)
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.training.log import METRICS


def bench_guard(
    collapsed_runs: Sequence[pathlib.Path],
    healthy_runs: Sequence[pathlib.Path],
    thresholds: Mapping[str, float],
    guard: Guard | None = None,
) -> dict[str, Any]:
    """Replays a guard over runs whose end is known.

    Every action is replayed as a warning, because a replay does not have the log of another
    training.

    Args:
      collapsed_runs: the folders of runs that collapsed.
      healthy_runs: the folders of runs that did not.
      thresholds: by indicator, a threshold other than that of the guard.
      guard: the other settings; None: the defaults.

    Returns:
      The counts of runs with an incident, per indicator and of any, and one entry per run: its
      steps, the first incident of each indicator, and the extreme number of each indicator.

    Raises:
      UserError: a run has no metrics, or an indicator is unknown.
    """
    guard = with_thresholds(guard or Guard(), thresholds)
    groups = {"collapsed": collapsed_runs, "healthy": healthy_runs}
    runs = [
        {"run": folder.name, "outcome": outcome, **replay(guard, rows_of(folder))}
        for outcome, folders in groups.items()
        for folder in folders
    ]
    return {
        "thresholds": {name: limit.threshold for name, limit in guard.limits.items()},
        "patience": guard.patience,
        "baseline_steps": guard.baseline_steps,
        **{outcome: len(folders) for outcome, folders in groups.items()},
        "runs_with_incident": _counts(runs, tuple(groups)),
        "runs": runs,
    }


def with_thresholds(guard: Guard, thresholds: Mapping[str, float]) -> Guard:
    """Returns a guard that only warns, with other thresholds.

    Args:
      guard: the guard.
      thresholds: by indicator; the others keep theirs.

    Raises:
      UserError: an indicator is unknown.
    """
    if unknown := sorted(thresholds.keys() - INDICATORS.keys()):
        raise UserError(f"indicator {unknown[0]} is unknown: use some of {', '.join(INDICATORS)}")
    limits: dict[str, Any] = {
        name: dataclasses.replace(
            limit, threshold=thresholds.get(name, limit.threshold), action="warn"
        )
        for name, limit in guard.limits.items()
    }
    return dataclasses.replace(guard, **limits)


def parse_thresholds(texts: Sequence[str]) -> dict[str, float]:
    """Parses `INDICATOR=NUMBER` of the command line.

    Raises:
      UserError: a text has another form, or its number is not above 0.
    """
    thresholds = dict[str, float]()
    for text in texts:
        name, _, number = text.partition("=")
        # Two checks would need two messages for one mistake.
        try:
            thresholds[name] = float(number)
        except ValueError:
            thresholds[name] = 0.0
        if not 0 < thresholds[name] < float("inf"):
            raise UserError(f"--thresholds {text}: give INDICATOR=NUMBER above 0, such as kl=0.5")
    return thresholds


def rows_of(run: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run.

    Raises:
      UserError: there are none.
    """
    rows = list(read_rows(run / METRICS))
    if not rows:
        raise UserError(f"{run / METRICS} has no metrics: give the folder of a run")
    return rows


def replay(guard: Guard, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Replays a guard over the metrics of one run.

    Args:
      guard: the guard.
      rows: the rows of `metrics.jsonl`.

    Returns:
      The number of steps, the step of the first incident of each indicator, and the number of each
      indicator that came closest to its threshold or went farthest beyond it.
    """
    history, incidents, steps = History(), list[Incident](), 0
    extremes = dict[str, float]()
    for row in rows:
        for (name, key), trend in history.trends.items():
            if row.get(key) is not None and applies(INDICATORS[name], row):
                number = number_of(INDICATORS[name], row[key], trend, guard.baseline_steps)
                # Farther than the extreme so far means beyond it as a threshold.
                if is_beyond(INDICATORS[name], number, extremes.get(name, _safest(name))):
                    extremes[name] = float(f"{number:.4g}")
        history, news = guard.observe(history, row)
        incidents, steps = [*incidents, *news], row["step"]
    first = {incident.indicator: incident.step for incident in reversed(incidents)}
    return {"steps": steps, "first_incident": first, "extremes": extremes}


def _safest(name: str) -> float:
    """The number of an indicator that is on the safe side of any threshold."""
    return float("inf") if INDICATORS[name].is_low else float("-inf")


def _counts(runs: Sequence[Mapping[str, Any]], outcomes: Sequence[str]) -> dict[str, Any]:
    """The number of runs of each outcome with an incident, of any indicator and of each."""
    # Counted once per run and indicator: later incidents of a run follow from the first one.
    names = [
        (run["outcome"], name) for run in runs for name in run["first_incident"] | _any_of(run)
    ]
    return {
        name: {outcome: names.count((outcome, name)) for outcome in outcomes}
        for name in ("any", *INDICATORS)
    }


def _any_of(run: Mapping[str, Any]) -> dict[str, int]:
    """The first incident of a run as that of the indicator `any`; empty without an incident."""
    return {"any": min(run["first_incident"].values())} if run["first_incident"] else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for outcome in ("collapsed", "healthy"):
        parser.add_argument(f"--{outcome}", nargs="+", type=pathlib.Path, default=[], metavar="RUN")
    parser.add_argument("--thresholds", nargs="+", default=[], metavar="INDICATOR=NUMBER")
    options = parser.parse_args()
    thresholds = parse_thresholds(options.thresholds)
    print(json.dumps(bench_guard(options.collapsed, options.healthy, thresholds), indent=2))


if __name__ == "__main__":
    main()
