"""Reads the files of a run that a report shows: metrics, trees, summary and config."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads, read_object

METRICS, TREES, SUMMARY = "metrics.jsonl", "trees.jsonl", "summary.json"
CONFIG = "config.json"


class RunData(NamedTuple):
    """Contents of a report. `metrics` and `trees` have one row per step, in order of steps."""

    metrics: Sequence[Mapping[str, Any]]
    trees: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    config: Mapping[str, Any] = MappingProxyType({})


class Curve(NamedTuple):
    """The finite values of one metric and their steps; both have the same length."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


def load_run(workdir: pathlib.Path) -> RunData:
    """Reads the files of a run, of which only the metrics must exist, else `UserError`."""
    trees = workdir / TREES
    summary, config = (
        read_object(file, _remedy(file)) if file.is_file() else {}
        for file in (workdir / SUMMARY, workdir / CONFIG)
    )
    # A policy that was evaluated without a training step has no metrics.
    lines = [] if summary.get("steps") == 0 else read_lines(workdir / METRICS)
    return RunData(
        metrics=by_step(lines),
        trees=by_step(read_lines(trees)) if trees.is_file() else (),
        summary=summary,
        config=config,
    )


def read_lines(path: pathlib.Path) -> list[Mapping[str, Any]]:
    """Reads one JSON object per line, except a last line that a killed run truncated."""
    try:
        lines = [x for x in path.read_text(encoding="utf-8").splitlines() if x.strip()]
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {_remedy(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): {_remedy(path)}") from None
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = loads(line)
        except ValueError as error:
            # Only a last line may be incomplete: the run was killed while it wrote.
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: not JSON ({error}): {_remedy(path)}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object: {_remedy(path)}")
        rows.append(row)
    return rows


def by_step(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row per step, in order. If a resumed run repeats a step, the later values count."""
    row_of: dict[float, dict[str, Any]] = {}
    for row in rows:
        step = row.get("step")
        if is_number(step):
            row_of[float(step)] = {**row_of.get(float(step), {}), **row}  # type: ignore[arg-type]
    return [row_of[step] for step in sorted(row_of)]


def curve(metrics: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """The curve of one metric over the steps that have it."""
    points = [(float(row["step"]), float(row[key])) for row in metrics if is_number(row.get(key))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(tuple(steps), tuple(values))


def keys_under(metrics: Sequence[Mapping[str, Any]], prefix: str) -> list[str]:
    """Metric names that start with `prefix`, in order of their first occurrence."""
    return list(dict.fromkeys(key for row in metrics for key in row if key.startswith(prefix)))


def is_number(x: Any) -> bool:
    """Whether `x` is a finite number and not a bool."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _remedy(path: pathlib.Path) -> str:
    command = "quickstart" if path.name == SUMMARY else "train --config=CONFIG"
    return f"create it with 'ragrl {command} --workdir={path.parent}'"
