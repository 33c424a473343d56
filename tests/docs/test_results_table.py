"""The tables of results over seeds have the variance over seeds and over questions."""

from __future__ import annotations

import re

import results
from pytest import approx

from jax_ragrl.experiments.statistics import seed_interval


def interval(*arguments, shared):
    """The mean and the interval of a summary."""
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
    readme = (results.DATA.parents[1] / "README.md").read_text("utf-8")
    gains = re.findall(r"[+-]\d+\.\d \[-?\d+\.\d, -?\d+\.\d\]", readme)
    assert len(gains) == 7 and all(f"| {gain} |" in results.real_gains() for gain in gains)
