"""Reads what a run leaves in its folder: metrics, trees and a summary."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax_ragrl.errors import UserError

METRICS, TREES, SUMMARY = "metrics.jsonl", "trees.jsonl", "summary.json"
CONFIG = "config.json"


class Run(NamedTuple):
    """What a report is made of. `metrics` and `trees` are in order of step, one row a step."""

    metrics: Sequence[Mapping[str, Any]]
    trees: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    config: Mapping[str, Any] = MappingProxyType({})


class Curve(NamedTuple):
    """The finite values of one metric and the steps they belong to; equal lengths."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


def load_run(workdir: pathlib.Path) -> Run:
    """The files of a run; one without trees or summary (`ragrl train` writes none) shows none.

    Raises:
      UserError: the metrics are missing, or a file cannot be read.
    """
    trees, summary, config = workdir / TREES, workdir / SUMMARY, workdir / CONFIG
    return Run(
        metrics=by_step(read_lines(workdir / METRICS)),
        trees=by_step(read_lines(trees)) if trees.is_file() else (),
        summary=read_object(summary) if summary.is_file() else {},
        config=read_object(config) if config.is_file() else {},
    )


def read_object(path: pathlib.Path) -> Mapping[str, Any]:
    """The JSON object of a file."""
    try:
        found = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}): {_remedy(path)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object: {_remedy(path)}")
    return found


def read_lines(path: pathlib.Path) -> list[Mapping[str, Any]]:
    """One JSON object a line. A last line cut off by a killed run is left out."""
    lines = [line for line in _text(path).splitlines() if line.strip()]
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: not JSON ({error}): {_remedy(path)}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object: {_remedy(path)}")
        rows.append(row)
    return rows


def by_step(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows in order of step. A resumed run may repeat a step: what it wrote last holds."""
    merged: dict[float, dict[str, Any]] = {}
    for row in rows:
        step = row.get("step")
        if is_number(step):
            merged[float(step)] = {**merged.get(float(step), {}), **row}  # type: ignore[arg-type]
    return [merged[step] for step in sorted(merged)]


def curve(metrics: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """One metric over the steps that have it."""
    points = [(float(row["step"]), float(row[key])) for row in metrics if is_number(row.get(key))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(tuple(steps), tuple(values))


def keys_under(metrics: Sequence[Mapping[str, Any]], prefix: str) -> list[str]:
    """Metric names that start with `prefix`, in the order in which they first occur."""
    return list(dict.fromkeys(key for row in metrics for key in row if key.startswith(prefix)))


def is_number(x: Any) -> bool:
    """Whether `x` is a finite number and no bool."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {_remedy(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): {_remedy(path)}") from None


def _remedy(path: pathlib.Path) -> str:
    command = "quickstart" if path.name == SUMMARY else "train --config=CONFIG"
    return f"make it with 'ragrl {command} --workdir={path.parent}'"
