"""Tables of docs/data/*.json: measurements, each row with its command and its commit."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import numpy as np

from jax_ragrl.evaluation.suite import markdown_table as table
from jax_ragrl.experiments.statistics import (
    INTERVAL_ERRORS,
    detectable_difference,
    points,
    seed_interval,
)

DATA = pathlib.Path(__file__).parents[1] / "data"


def load(name: str) -> dict:
    """One file of measurements."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def markdown(name: str, group: str = "") -> str:
    """A table, with the command and commit of its rows below it; of one group of rows if named."""
    data = load(name)
    data["rows"] = [row for row in data["rows"] if not group or row.get("group") == group]
    columns = [c for c in data["columns"] if any(c in row["cells"] for row in data["rows"])]
    head = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns)
    rows = [
        "| " + " | ".join(str(row["cells"].get(c, "")) for c in columns) + " |"
        for row in data["rows"]
    ]
    return "\n".join([f"{data['title']}:\n", head, *rows, "", origins(data)])


def origins(data: dict) -> str:
    """How each row was measured; rows measured alike share a line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in data["rows"]:
        key = (row["command"], row["commit"], row.get("device", data.get("device", "")))
        name = str(next(iter(row["cells"].values())))
        if name not in lines.setdefault(key, []):
            lines[key].append(name)
    text = []
    for (command, commit, device), names in lines.items():
        which = "All rows" if len(lines) == 1 else ", ".join(names)
        text.append(f"- {which}: `{command}`, commit `{commit}`, {device}.")
    return "\n".join(text) + "\n"


def real_gains() -> str:
    """Differences on real questions: each seed, and over seeds and questions."""
    columns = ("trained policy over", "metric", "each seed", *SUMMARY)
    rows = []
    for over, seeds in by_name("real_gains", "Over").items():
        for metric in ("F1", "cover-EM"):
            gains = [cells[metric] for cells in seeds]
            # Intervals of some seeds alone do not bound the error of the mean.
            kept = all(f"{metric}, 95 %" in cells for cells in seeds)
            intervals = [cells[f"{metric}, 95 %"] for cells in seeds] if kept else ()
            each = ", ".join(f"{gain:+}" for gain in gains)
            rows.append((over, metric, each, *summary(gains, intervals, shared=True)))
    # The commands are below the tables of the scores.
    return f"{load('real_gains')['title']}:\n\n{table(columns, rows)}"


def trial_gains() -> str:
    """The gains of the trials over seeds, over the warm start and over what is not trained."""
    rows = []
    for system, seeds in by_name("trials", "System").items():
        other = WORKFLOW if WORKFLOW in seeds[0] else "Standard RAG"
        intervals = [json.loads(cells["95 % interval"]) for cells in seeds]
        gains = [cells["F1 after"] - cells["F1 before"] for cells in seeds]
        over = [cells["F1 after"] - cells[other] for cells in seeds]
        untrained = f"{summary(over, (), shared=False)[0]} ({other})"
        rows.append((system, *summary(gains, intervals, shared=False), untrained))
    return table(("system", *SUMMARY, "over what is not trained"), rows)


def by_name(name: str, column: str) -> dict[str, list[dict]]:
    """The cells of the rows of a file by those of a column."""
    groups: dict[str, list[dict]] = {}
    for row in load(name)["rows"]:
        groups.setdefault(row["cells"][column], []).append(row["cells"])
    return groups


WORKFLOW = "Best fixed workflow, untrained"
SUMMARY = ("mean, 95 %", "could be seen", "deviation between seeds", "error over questions")


def summary(
    gains: Sequence[float], intervals: Sequence[Sequence[float]], shared: bool
) -> tuple[str, str, str, str]:
    """The columns `SUMMARY` of a difference that was measured with several seeds.

    Args:
      gains: the mean difference of each seed, in points.
      intervals: the 95 % interval of each over the questions; empty: not kept.
      shared: whether the seeds have the same questions. Then their mean has the error over the
        questions of one seed at worst, which is added to Student's t over the seeds in squares.
        Otherwise the deviation between seeds contains it.
    """
    mean, low, high = seed_interval(np.array(gains))
    deviation = f"{np.std(gains, ddof=1):.2f}" if len(gains) > 1 else "one seed"
    if shared and not intervals:
        return f"{mean:+.1f}", points(None), deviation, "not kept"
    halves = np.array([(high - low) / 2 for low, high in intervals])
    half = float(np.sqrt((halves**2).mean())) if intervals else 0.0
    if len(gains) == 1:
        low, high = intervals[0]
    elif shared:
        whole = float(np.hypot(half, high - mean))
        low, high = mean - whole, mean + whole
    seen = points(detectable_difference(low, high))
    return f"{mean:+.1f} [{low:.1f}, {high:.1f}]", seen, deviation, f"{half / INTERVAL_ERRORS:.2f}"
