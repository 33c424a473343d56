"""Laws of the tables of the credit grid."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import numpy as np

from jax_ragrl.experiments.arms import Cell, cells_of, load_experiment
from jax_ragrl.experiments.comparison import write_comparison

ROOT = pathlib.Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("credit_grid", ROOT / "docs/data/credit_grid.py")
grid = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(grid)
EXPERIMENT = load_experiment(ROOT / grid.FILE)


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


def test_the_grid_has_27_arms_with_names_of_the_tables():
    assert len(EXPERIMENT.arms) == 27
    names = {f"{sharing}-{credit}" for sharing in grid.SHARING for credit in grid.CREDITS}
    assert names == set(EXPERIMENT.arms)


def test_a_choice_is_compared_over_all_arms_that_both_sides_have():
    table = {line["Choice"]: line for line in grid.factor_rows(rows())}
    line = table["`separate-*` over `one-*`"]
    assert line["Pairs of cells"] == 2 * 8  # without the arm that one side lacks
    assert line["Difference"] == "+10.00" and line["Verdict"] == "higher"
    assert table["`separate_lora-*` over `separate-*`"]["Difference"] == "-10.00"
    assert table["`*-children` over `*-leaves`"]["Pairs of cells"] == 2 * 3
    assert table["`*-rloo` over `*-grpo`"]["Pairs of cells"] == 2 * 2


def test_a_choice_without_finished_cells_has_no_row():
    some = {cell: x for cell, x in rows().items() if cell.arm.startswith("one-")}
    assert not [x for x in grid.factor_rows(some) if "separate" in x["Choice"]]


def test_the_tables_are_written_from_the_finished_cells(tmp_path, monkeypatch):
    for cell, x in rows().items():
        (tmp_path / cell.folder).mkdir()
        (tmp_path / cell.folder / "cell.json").write_text(json.dumps(x))
        step = {"step": 1, "role_gradient/share/router": 0.5, "advantage/std/router": 2.0}
        (tmp_path / cell.folder / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    monkeypatch.setattr(grid, "HERE", tmp_path)
    monkeypatch.chdir(ROOT)
    write_comparison(*grid.finished_part(EXPERIMENT, tmp_path), tmp_path)
    grid.main(tmp_path, "0123abc", "a device")
    names = ("credit_grid", "credit_grid_factors", "credit_grid_roles")
    arms, factors, roles = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    assert len(arms["rows"]) == 26 and "52 trainings" in arms["title"]
    assert len(factors["rows"]) == len(grid.FACTORS)
    assert [x["cells"]["Variance of advantages, router"] for x in roles["rows"]] == [4.0] * 8
    assert all(x["commit"] == "0123abc" for x in (*arms["rows"], *roles["rows"]))
