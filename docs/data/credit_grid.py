"""Makes the tables of the credit grid from the finished cells of two experiments.

    ragrl experiment run configs/experiments/credit_grid.py --out runs/credit_grid --finished
    ragrl experiment run configs/experiments/credit_of_one_policy.py --out runs/credit_of_one_policy
    python docs/data/credit_grid.py COMMIT "DEVICE"

It writes `credit_grid.json` (arms against the baseline), `credit_one_policy.json` (arms with one
policy, more seeds, against the plans of the untrained policy), `credit_grid_factors.json` (one
choice against another, over all arms of both experiments that differ in nothing else) and
`credit_grid_roles.json` (gradients of the roles that share one policy). COMMIT is the commit of the
trainings, DEVICE a description.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jax_ragrl.experiments.arms import Cell, finished_part, load_experiment
from jax_ragrl.experiments.comparison import adjust_for_family, compare_pair, verdict
from jax_ragrl.experiments.pairs import Pair

GRID, ONE_POLICY = "credit_grid", "credit_of_one_policy"
HERE = pathlib.Path(__file__).parent
METRIC = "f1"
CREDITS = {
    "shared": ("chain", "answer's reward for all", "PPO"),
    "last": ("chain", "its own reward alone", "PPO"),
    "grpo": ("group", "rollouts", "GRPO"),
    "rloo": ("group", "rollouts", "leave one out"),
    "roles": ("group", "actions of the role", "GRPO"),
    "leaves": ("tree", "mean over leaves", "PPO"),
    "children": ("tree", "mean over children", "PPO"),
    "siblings": ("tree", "siblings", "GRPO"),
    "siblings_rloo": ("tree", "siblings", "leave one out"),
}
NOT_TRAINED = ("none", "", "")
DIFFERENCE = "Difference, 95 %"
# Choices compared: names of arms with `*` for every value of the other factor.
FACTORS = [
    ("separate-*", "one-*"),
    ("separate_lora-*", "one-*"),
    ("separate_lora-*", "separate-*"),
    ("*-shared", "*-last"),
    ("*-grpo", "*-shared"),
    ("*-leaves", "*-shared"),
    ("*-siblings", "*-grpo"),
    ("*-roles", "*-grpo"),
    ("*-rloo", "*-grpo"),
    ("*-children", "*-leaves"),
    ("*-siblings", "*-leaves"),
    ("*-siblings_rloo", "*-siblings"),
]
Rows = Mapping[Cell, Mapping[str, Any]]


def arm_rows(result: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """One row per arm, the best first."""
    over = {c["arm"]: c for c in result["comparisons"] if c["metric"] == METRIC}
    arms = result["arms"].items()
    for name, arm in sorted(arms, key=lambda item: -item[1]["scores"][METRIC]):
        rollouts, of, objective = CREDITS.get(name.partition("-")[2], NOT_TRAINED)
        cells = {"Arm": f"`{name}`", "Credit": f"{rollouts}: {of}" if of else rollouts}
        cells |= {"Objective": objective, "Seeds": arm["cells"]}
        # An arm that is not trained generates no tokens.
        tokens = round(arm["totals"].get("policy_tokens", 0))
        cells |= {"F1": arm["scores"][METRIC], "Tokens": tokens}
        yield cells | difference_cells(over.get(name))


def difference_cells(comparison: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns of a comparison; without one, the arm is the baseline."""
    if comparison is None:
        return {DIFFERENCE: "baseline", "Verdict": ""}
    low, high = comparison["ci95"]
    return {
        DIFFERENCE: f"{comparison['mean']:+.2f} [{low:.2f}, {high:.2f}]",
        "Verdict": comparison["verdict"],
    }


def factor_rows(rows: Rows) -> Iterable[dict[str, Any]]:
    """One row per pair of choices that some finished cells of equal seeds have."""
    pooled: dict[Cell, dict[str, Any]] = {}
    for pair in FACTORS:
        for side, mean in zip(pair, mean_scores(pair, rows), strict=True):
            for seeds, (count, scores) in mean.items():
                label = f"{side} of {pair[0]} and {pair[1]}"
                pooled[Cell(label, *seeds)] = row_of(scores, count)
    pairs = [
        compare_pair(Pair(*(f"{side} of {a} and {b}" for side in (a, b)), METRIC), pooled)
        for a, b in FACTORS
        if any(cell.arm == f"{a} of {a} and {b}" for cell in pooled)
    ]
    for comparison in adjust_for_family(pairs):
        a, b = (comparison[key].partition(" ")[0] for key in ("arm", "over"))
        sizes = [pooled[c]["pairs"] for c in pooled if c.arm == comparison["arm"]]
        cells = {"Choice": f"`{a}` over `{b}`", "Pairs of cells": sum(sizes)}
        yield cells | difference_cells(comparison | {"verdict": verdict(comparison)})


def row_of(scores: np.ndarray, count: int) -> dict[str, Any]:
    """A row like that of a cell, of the mean scores of several arms."""
    return {"scores": {METRIC: scores.tolist()}, "questions": "", "pairs": count}


def mean_scores(
    pair: tuple[str, str], rows: Rows
) -> tuple[dict[tuple[int, int, int], tuple[int, np.ndarray]], ...]:
    """Per side of a pair and seeds: the number of arms that both have, and their mean scores."""
    sides = [matching(pattern, rows) for pattern in pair]
    both = sides[0].keys() & sides[1].keys()
    result: tuple[dict[Any, Any], ...] = ({}, {})
    for seeds in sorted({seeds for _, seeds in both}):
        names = sorted(name for name, own in both if own == seeds)
        for side, scores in zip(sides, result, strict=True):
            scores[seeds] = len(names), np.mean([side[name, seeds] for name in names], axis=0)
    return result


def matching(pattern: str, rows: Rows) -> dict[tuple[str, tuple[int, int, int]], np.ndarray]:
    """The scores of the arms of a pattern, by the name in place of `*` and by seeds."""
    before, after = pattern.split("*")
    return {
        (name[len(before) : len(name) - len(after)], cell.seeds): np.array(
            row["scores"][METRIC], np.float64
        )
        for cell, row in rows.items()
        if (name := cell.arm).startswith(before) and name.endswith(after)
    }


def role_rows(result: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """One row per arm whose roles share a policy: their parts in the gradient."""
    for name, arm in result["arms"].items():
        if not name.startswith("one-"):
            continue
        means = arm["means"]
        cells: dict[str, Any] = {"Arm": f"`{name}`"}
        for role in ("router", "filter", "decision"):
            cells[f"Share, {role}"] = means.get(f"role_gradient/share/{role}", "")
            cells[f"Norm, {role}"] = means.get(f"role_gradient/norm/{role}", "")
            if (deviation := means.get(f"advantage/std/{role}")) is not None:
                cells[f"Variance of advantages, {role}"] = round(deviation**2, 3)
        for a, b in itertools.combinations(("router", "filter", "decision"), 2):
            cells[f"Cosine, {a} and {b}"] = means.get(f"role_gradient/cosine/{a}/{b}", "")
        yield cells


def write(
    name: str, title: str, rows: Iterable[dict[str, Any]], origin: dict[str, str], device: str
) -> None:
    """Writes one table in the form that `docs/_ext/results.py` reads."""
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = {"title": title, "device": device, "columns": columns}
    table["rows"] = [{"cells": row, **origin} for row in rows]
    text = json.dumps(table, indent=1, ensure_ascii=False)
    (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def finished(name: str, runs: pathlib.Path) -> tuple[dict[str, Any], Rows]:
    """The comparison of an experiment and the rows of its finished cells, from `runs/NAME`."""
    result = json.loads((runs / name / "experiment.json").read_text(encoding="utf-8"))
    file = pathlib.Path(f"configs/experiments/{name}.py")
    return result, finished_part(load_experiment(file), runs / name)[1]


def main(commit: str, device: str, runs: pathlib.Path = pathlib.Path("runs")) -> None:
    """Writes the tables of the finished cells of both experiments."""
    grid, rows = finished(GRID, runs)
    one_policy, more = finished(ONE_POLICY, runs)
    trainings = sum(cell.arm != one_policy["baseline"] for cell in more)
    arms = "F1 in percent on 400 test questions, {} trainings, all arms against `{}`"
    choices = "F1, difference in points between two choices, over all arms equal in the rest"
    roles = "Gradients and advantages of roles that share one policy, means over steps and seeds"
    of_grid, of_one_policy = (
        f"ragrl experiment run configs/experiments/{name}.py" for name in (GRID, ONE_POLICY)
    )
    tables = {
        "credit_grid": (arms.format(len(rows), grid["baseline"]), arm_rows(grid), of_grid),
        "credit_one_policy": (
            arms.format(trainings, one_policy["baseline"]),
            arm_rows(one_policy),
            of_one_policy,
        ),
        # Each command of a row is in backticks on the page.
        "credit_grid_factors": (
            choices,
            factor_rows({**more, **rows}),
            f"{of_grid}` and `{of_one_policy}",
        ),
        "credit_grid_roles": (roles, role_rows(grid), of_grid),
    }
    for name, (title, table, command) in tables.items():
        write(name, title, table, {"command": command, "commit": commit}, device)


if __name__ == "__main__":
    main(*sys.argv[1:3])
