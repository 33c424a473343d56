"""The tables of results: claims, seeds, and questions that no choice of a schedule has seen."""

import json
import pathlib
import re
import runpy
from pathlib import Path
from typing import Any

import claim_table
import pytest
import results
from pytest import approx

from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.corpus.mixture import load_answered
from jax_ragrl.corpus.questions import QuestionStream
from jax_ragrl.experiments.claims import OPEN, load_claims, load_results
from jax_ragrl.experiments.pairs import FAILS, HOLDS
from jax_ragrl.experiments.statistics import seed_interval

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


def interval(*arguments, shared):
    mean, _, rest = results.summary(*arguments, shared=shared)[0].partition(" [")
    return float(mean), *(float(x) for x in rest.strip("]").split(", "))


def test_shared_questions_add_their_error_to_that_over_seeds():
    gains, own = [10.0, 12.0, 14.0], [[6.0, 14.0], [8.0, 16.0], [10.0, 18.0]]
    mean, low, high = interval(gains, own, shared=True)
    _, seed_low, _ = seed_interval(results.np.array(gains))
    assert (high - mean) ** 2 == approx((mean - seed_low) ** 2 + 4.0**2, rel=0.02)
    assert high - mean == approx(mean - low)
    assert interval(gains, own, shared=False)[1] == approx(seed_low, abs=0.05)


def test_one_seed_keeps_its_interval_and_missing_ones_give_none():
    assert interval([9.7], [[6.0, 13.7]], shared=True) == (9.7, 6.0, 13.7)
    missing = ("+11.0", "unknown", "1.41", "not kept")
    assert results.summary([10.0, 12.0], (), shared=True) == missing


def test_the_gains_of_the_readme_are_those_of_the_table():
    readme = (
        (results.DATA.parents[1] / "README.md").read_text("utf-8").partition("With retrieval")[0]
    )
    gains = re.findall(r"[+-]\d+\.\d \[-?\d+\.\d, -?\d+\.\d\]", readme)
    assert len(gains) == 7 and all(f"| {gain} |" in results.real_gains() for gain in gains)


SCRIPT = Path(__file__).parents[2] / "docs" / "data" / "unseen_questions.py"


def ids(file: Path) -> list[str]:
    return [json.loads(line)["id"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_tested_questions_were_neither_labeled_nor_trained_on(tmp_path):
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    test, train = ids(tmp_path / "test.jsonl"), ids(tmp_path / "train.jsonl")
    questions = load_answered(data_path("nq:train"))
    assert len(test) == 400 and sorted(test + train) == sorted(q.id for q in questions)
    assert [q.id for q in questions[:300]] == train[:300]  # the labels of the warm start
    trained = {q.id for q in QuestionStream(questions, seed=0).draw(32 * 8)}
    assert len(trained) == 256 and not trained & set(test)
