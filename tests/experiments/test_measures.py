"""Measures of cells: from their scores, predictions and training metrics."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.experiments.arms import Cell
from jax_ragrl.experiments.comparison import compare_pair, paired_differences
from jax_ragrl.experiments.measures import question_mask, training_means, values_of, with_facts
from jax_ragrl.experiments.pairs import Pair


def prediction(**changes: Any) -> dict[str, Any]:
    return {
        "scores": {"cover_em": 1.0},
        "costs": {"retrieval_calls": 2.0},
        "answer": "Oslo",
        "finish_reason": "answered",
        "strategy": "Planning",
        "faults": [],
        "hops": 1,
        "kind": "chain",
        "gold_passages": [],
        "passages": [],
    } | changes


FAILED = {"finish_reason": "failed", "strategy": None, "costs": {"retrieval_calls": None}}
ROWS = (
    prediction(),
    prediction(strategy="Retrieval", hops=3, faults=["Bad", "Bad"], kind="comparison"),
    prediction(scores={"cover_em": 0.0}, answer="Bergen"),
    prediction(**FAILED, scores={"cover_em": None}, answer=None),
)


@pytest.fixture
def row(tmp_path: pathlib.Path) -> dict[str, Any]:
    """A finished cell with predictions of four questions and metrics of three steps."""
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "test.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in ROWS)
    )
    steps = [{"step": 1, "valid_frac/a": 0.5}, {"step": 2, "valid_frac/a": 1.0}, {"kl/mean": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in steps))
    scores = {"cover_em": [r["scores"]["cover_em"] for r in ROWS]}
    return with_facts({"scores": scores, "questions": "q"}, tmp_path)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("cover_em", [100, 100, 0, np.nan]),
        ("retrieval_calls", [2, 2, 2, np.nan]),
        ("malformed", [0, 2, 0, np.nan]),
        ("strategy=Planning", [100, 0, 100, np.nan]),
        ("strategy=Other", [0, 0, 0, np.nan]),
        ("mistake=wrong", [0, 0, 100, np.nan]),
        ("training:valid_frac/a", [75]),
        ("training:kl/mean", [3]),
    ],
)
def test_a_measure_has_one_number_per_question_or_training(row, measure, expected):
    np.testing.assert_array_equal(values_of(row, measure), expected)


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        ("f2", "no metric 'f2': use one of cover_em, malformed, retrieval_calls"),
        ("hops", "no metric 'hops'"),
        ("strategy", "no metric 'strategy'"),
        ("reward=1", "no metric 'reward=1'"),
        ("training:lr", "no metric 'lr': use one of metrics.jsonl, such as kl/mean"),
    ],
)
def test_an_unknown_measure_names_the_known_ones(row, measure, message):
    with pytest.raises(UserError, match=message):
        values_of(row, measure)


def test_questions_are_selected_by_hops_and_kind(row):
    np.testing.assert_array_equal(question_mask(row, "hops=3,4"), [False, True, False, False])
    np.testing.assert_array_equal(question_mask(row, "kind=chain"), [True, False, True, True])
    for wrong, message in (("hops=9", "no test question has hops=9"), ("size=1", "use hops=")):
        with pytest.raises(UserError, match=message):
            question_mask(row, wrong)


def test_a_pair_compares_two_measures_among_some_questions(row):
    rows = {Cell("a", 0, 0, 0): row}
    pair = Pair("a", "a", "cover_em", among="kind=chain", second_metric="strategy=Planning")
    (difference,) = paired_differences(pair, rows).values()
    np.testing.assert_array_equal(difference, [0, np.nan, -100, np.nan])


def test_measures_of_the_training_are_tested_over_seeds():
    def row_of(share: float) -> dict[str, Any]:
        return {"questions": "q", "scores": {}, "training": {"valid_frac/a": share}}

    shares = {0: (0.9, 0.8), 1: (0.95, 0.84), 2: (0.88, 0.77)}
    rows = {
        Cell(arm, seed, 0, 0): row_of(share)
        for seed, both in shares.items()
        for arm, share in zip("ab", both, strict=True)
    }
    result = compare_pair(Pair("a", "b", "training:valid_frac/a"), rows)
    # The differences are 10, 11 and 11: t = 32 with two degrees of freedom.
    assert [result["mean"], *result["ci95"]] == pytest.approx([10.67, 9.23, 12.1], abs=0.005)
    assert result["p"] == pytest.approx(0.00098, abs=1e-5) and result["cells"] == 3
    one = {cell: x for cell, x in rows.items() if cell.training == 0}
    assert compare_pair(Pair("a", "b", "training:valid_frac/a"), one)["p"] == 1.0


def test_a_training_without_metrics_has_no_means(tmp_path):
    assert training_means(tmp_path / "metrics.jsonl") == {}
