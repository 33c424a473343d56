"""The table of claims on the page of results shows every claim, with or without its result."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import claim_table
import pytest

from jax_ragrl.experiments.claims import OPEN, load_claims, load_results
from jax_ragrl.experiments.pairs import FAILS, HOLDS

ONE = "ragrl experiment reproduce --claims 1 --training-seeds 0,1 --world-seed 100"
PAIR = {"text": "new over old (F1)", "mean": 3.5, "ci95": [1.0, 6.0], "detectable": 3.57}


def result(number: int, **changes: Any) -> dict[str, Any]:
    fields = {"number": number, "verdict": "holds", "tests": [], "pairs": [], "missing": ""}
    command = f"ragrl experiment reproduce --claims {number}"
    return fields | {"command": command, "commit": "abc1234", "device": "2 cores"} | changes


@pytest.fixture
def render(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """A function from results to the lines of the page by the number of their claim."""
    monkeypatch.setattr(claim_table, "DATA", tmp_path)

    def render(*results: dict[str, Any]) -> tuple[str, dict[str, str]]:
        (tmp_path / "claims.json").write_text(json.dumps(results))
        text = claim_table.markdown()
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        return text, {row.split(" | ")[0].removeprefix("| "): row for row in rows}

    return render


def test_every_claim_has_a_row_without_any_result(render):
    text, rows = render()
    claims = load_claims()
    assert all(claim.statement in rows[str(claim.number)] for claim in claims)
    undecidable = [c for c in claims if not (c.pairs or c.tests)]
    count = len(undecidable)
    assert text.startswith(f"Verdicts on 31 claims: not run {31 - count}, open {count}.")
    for claim in undecidable:
        assert claim.missing in rows[str(claim.number)] and "| open |" in rows[str(claim.number)]


def test_results_have_differences_seeds_and_commands(render):
    pairs = [PAIR | {"verdict": "holds"}, PAIR | {"verdict": "undecided"}]
    text, rows = render(
        result(
            1, pairs=pairs, verdict="undecided", seeds=[0, 1], missing="more seeds", command=ONE
        ),
        result(16, tests=["tests/a.py::test_c"], proof="holds"),
        result(6, tests=["tests/a.py::test_b"], proof="does not hold", verdict="does not hold"),
    )
    assert "does not hold 1, " in text and "undecided 1." in text
    evidence = "new over old (F1): +3.50 [1.00, 6.00], 3.57"
    assert f"| {evidence}: holds<br>{evidence}: undecided<br>{OPEN}: more seeds |" in rows["1"]
    assert "| undecided | " in rows["1"] and rows["1"].endswith(" | 0, 1 |")
    assert "test `tests/a.py::test_b`: does not hold" in rows["6"]
    assert f"- `{ONE}`, commit `abc1234`, 2 cores.\n" in text
    assert "- `ragrl experiment reproduce --claims 16,6`, commit `abc1234`, 2 cores.\n" in text


def test_the_p_value_of_a_later_look_is_for_all_looks(render):
    pairs = [PAIR | {"verdict": "holds", "p_adjusted": p} for p in (0.004, 0.01)]
    text, rows = render(result(3, pairs=pairs), result(27, verdict="does not hold"), result(1))
    assert "| holds, look 3, p 0.0300 |" in rows["3"] and "| holds |" in rows["1"]
    assert "| does not hold, by a later rule |" in rows["27"]
    assert "does not hold 1, holds 2, " in text


def test_the_readme_counts_the_decided_claims():
    root = pathlib.Path(__file__).parents[2]
    results = load_results(root / "docs" / "data" / "claims.json")
    decided = sum(row["verdict"] in (HOLDS, FAILS) for row in results)
    text = (root / "README.md").read_text("utf-8")
    hold = sum(row["verdict"] == HOLDS for row in results)
    assert f"{decided} of {len(load_claims())} so far ({hold} hold)" in text
