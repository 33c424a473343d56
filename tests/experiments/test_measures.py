"""Measures of cells, from their scores, predictions and training metrics, and statistics."""

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.experiments.arms import Cell
from jax_ragrl.experiments.comparison import compare_pair, paired_differences
from jax_ragrl.experiments.measures import question_mask, values_of, with_facts
from jax_ragrl.experiments.pairs import Pair
from jax_ragrl.experiments.statistics import detectable_difference, holm, seed_test, sign_flip_test


def prediction(**changes: Any) -> dict[str, Any]:
    row = {"scores": {"cover_em": 1.0}, "costs": {"retrieval_calls": 2.0}, "answer": "Oslo"}
    row |= {"finish_reason": "answered", "strategy": "Planning", "hops": 1, "kind": "chain"}
    return row | {"faults": [], "gold_passages": [], "passages": []} | changes


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


def test_a_pair_compares_two_measures_among_questions_of_some_hops_or_kind(row):
    np.testing.assert_array_equal(question_mask(row, "hops=3,4"), [False, True, False, False])
    np.testing.assert_array_equal(question_mask(row, "kind=chain"), [True, False, True, True])
    for wrong, message in (("hops=9", "no test question has hops=9"), ("size=1", "use hops=")):
        with pytest.raises(UserError, match=message):
            question_mask(row, wrong)
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


def test_a_detectable_difference_is_found_in_four_of_five_experiments():
    """Means of 100 normal values: the interval of each experiment, at the difference it names."""
    rng = np.random.default_rng(0)
    error = 1 / np.sqrt(100)
    difference = detectable_difference(-1.96 * error, 1.96 * error)
    means = rng.normal(difference, error, 20_000)
    assert np.mean(means > 1.96 * error) == pytest.approx(0.8, abs=0.01)


def test_the_sign_flip_test_equals_the_exact_one_and_is_never_zero():
    """Of all 2^8 signs, counted here, those whose sum is as extreme as the observed one."""
    x_Q = np.array([0.5, 1.0, -0.25, 0.75, 0.1, 0.3, -0.1, 0.6])
    sums = [abs(np.dot(signs, x_Q)) for signs in itertools.product((-1, 1), repeat=8)]
    exact = np.mean(np.array(sums) >= abs(x_Q.sum()) - 1e-9)
    assert sign_flip_test(x_Q) == pytest.approx(exact, abs=0.01)
    assert sign_flip_test(np.zeros(5)) == 1.0
    assert 0 < sign_flip_test(np.ones(200)) < 2e-4


def test_seeds_that_are_equal_but_for_rounding_are_certain(recwarn):
    """Student's t of no variance is infinite, and SciPy warns of cancellation."""
    assert seed_test(np.full(3, 0.1) + np.array([0.0, 1e-17, 2e-17])) == 0.0
    assert seed_test(np.array([0.3, 0.1 + 0.2, 0.3])) == 0.0 and seed_test(np.zeros(3)) == 1.0
    assert seed_test(np.array([1.8, 1.9, 7.6])) == pytest.approx(0.188, abs=1e-3)
    assert not recwarn.list


def test_holm_of_a_published_example():
    """Holm 1979: the k-th smallest of n is multiplied by n - k + 1, and made monotone."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
