"""Laws of the tables of the credit grid."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from jax_ragrl.experiments.arms import Cell, Experiment, cells_of, load_experiment
from jax_ragrl.experiments.comparison import write_comparison

ROOT = pathlib.Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("credit_grid", ROOT / "docs/data/credit_grid.py")
grid = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(grid)
FOLDER = ROOT / "configs/experiments"
EXPERIMENT = load_experiment(FOLDER / f"{grid.GRID}.py")
ONE_POLICY = load_experiment(FOLDER / f"{grid.ONE_POLICY}.py")


def row(scores: np.ndarray) -> dict:
    values = {"f1": scores.tolist(), "cover_em": scores.tolist()}
    return {"scores": values, "questions": "q", "totals": {"policy_tokens": 100.0}}


def rows() -> dict[Cell, dict]:
    """Two seeds of all arms; a policy per role adds 10 points to each arm of that credit."""
    noise = np.random.default_rng(0)
    base = {arm.partition("-")[2]: noise.random(300) / 2 for arm in EXPERIMENT.arms}
    cells = [c for c in cells_of(EXPERIMENT) if c.training < 2 and c.arm != "one-rloo"]
    gain = {cell: 0.1 * cell.arm.startswith("separate-") for cell in cells}
    # Seeds and arms differ, but the same for all ways of sharing.
    return {c: row(base[c.arm.partition("-")[2]] + gain[c] + 0.01 * c.training) for c in cells}


def finish(experiment: Experiment, cells: dict[Cell, dict], out: pathlib.Path) -> None:
    """Writes finished cells and their comparison."""
    for cell, x in cells.items():
        (out / cell.folder).mkdir(parents=True)
        (out / cell.folder / "cell.json").write_text(json.dumps(x))
        step = {"step": 1, "role_gradient/share/router": 0.5, "advantage/std/router": 2.0}
        (out / cell.folder / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    write_comparison(*grid.finished_part(experiment, out), out)


@pytest.mark.slow
def test_the_tables_are_written_from_the_finished_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "HERE", tmp_path)
    monkeypatch.chdir(ROOT)
    finish(EXPERIMENT, rows(), tmp_path / grid.GRID)
    shared = {c: x for c, x in rows().items() if c.arm.startswith("one-")}
    again = {c._replace(training=c.training + 2): x for c, x in shared.items()}
    untrained = row(np.zeros(300)) | {"totals": {}}
    simple = {Cell(ONE_POLICY.baseline, *c.seeds): untrained for c in again | shared}
    finish(ONE_POLICY, shared | again | simple, tmp_path / grid.ONE_POLICY)
    grid.main("0123abc", "a device", tmp_path)
    names = ("grid", "one_policy", "grid_factors", "grid_roles")
    arms, one_policy, factors, roles = (
        json.loads((tmp_path / f"credit_{name}.json").read_text()) for name in names
    )
    assert len(arms["rows"]) == 26 and "52 trainings" in arms["title"]
    assert len(one_policy["rows"]) == 9 and "32 trainings" in one_policy["title"]
    cells = {line["cells"]["Choice"]: line["cells"] for line in factors["rows"]}
    assert len(cells) == len(grid.FACTORS)
    assert cells["`*-children` over `*-leaves`"]["Pairs of cells"] == 2 * 3 + 2
    line = cells["`separate-*` over `one-*`"]
    assert line["Pairs of cells"] == 2 * 8  # without the arm that one side lacks
    assert line[grid.DIFFERENCE].startswith("+10.00 [") and line["Verdict"] == "higher"
    assert [x["cells"]["Variance of advantages, router"] for x in roles["rows"]] == [4.0] * 8
    assert all(x["commit"] == "0123abc" for x in (*arms["rows"], *roles["rows"]))
