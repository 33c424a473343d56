"""Statistics of experiments: tests of differences, and the smallest detectable difference.

Intervals over questions and seeds come from `text.metrics.hierarchical_bootstrap`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

SAMPLES = 10_000
ROUNDING = 1e-12  # of a mean of float64 scores, relative
# Standard errors in half a 95 % interval, and in a difference that is found in 80 % of cases.
INTERVAL_ERRORS, DETECTABLE_ERRORS = 1.96, 1.96 + 0.84


def detectable_difference(low: float, high: float) -> float:
    """Returns the smallest true difference that a test at 5 % would find in 80 % of experiments.

    Half the width of the 95 % interval of a measured, about normally distributed difference is 1.96
    standard errors. An interval without width, as of arms that never differ, gives nan: nothing was
    measured about the error.
    """
    if low == high:
        return float("nan")
    return DETECTABLE_ERRORS / INTERVAL_ERRORS * (high - low) / 2


def points(value: float | None) -> str:
    """Returns a number of points as text, `unknown` for nan or `None` (nan as JSON has it)."""
    return "unknown" if value is None or np.isnan(value) else f"{value:.2f}"


def sign_flip_test(differences_Q: np.ndarray, samples: int = SAMPLES, seed: int = 0) -> float:
    """Returns the two-sided p-value of a mean difference by random sign flips (Fisher 1935).

    Under the hypothesis that two arms are equal, the sign of the difference of each question, which
    is its mean over seeds, is random.
    """
    rng = np.random.default_rng(seed)
    nonzero_Q = differences_Q[differences_Q != 0]  # others never change a sum
    observed_sum = abs(nonzero_Q.sum())
    signs_SQ = rng.choice((-1.0, 1.0), size=(samples, len(nonzero_Q)))
    # The observed signs are one of the possible ones, so that a p-value is never 0. The tolerance
    # is for sums that are equal but for rounding.
    extreme = np.abs(signs_SQ @ nonzero_Q) >= observed_sum - 1e-9
    return float((1 + extreme.sum()) / (1 + samples))


def seed_interval(differences_S: np.ndarray) -> tuple[float, float, float]:
    """Returns (mean, low, high): the mean over seeds and its 95 % interval by Student's t.

    With fewer than two seeds the interval is infinite.
    """
    mean, half = float(differences_S.mean()), float("inf")
    if (count := len(differences_S)) > 1:
        error = differences_S.std(ddof=1) / np.sqrt(count)
        half = float(stats.t.ppf(0.975, count - 1) * error)
    return mean, mean - half, mean + half


def seed_test(differences_S: np.ndarray) -> float:
    """Returns the two-sided p-value of a mean difference over seeds, by Student's t."""
    if len(differences_S) < 2:
        return 1.0
    # Differences that are equal but for rounding are either all 0 or certainly not.
    if differences_S.std() <= ROUNDING * np.abs(differences_S).max():
        return float(not differences_S.any())
    return float(stats.ttest_1samp(differences_S, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted for the number of comparisons (Holm 1979), in the given order."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    # A larger p-value is never adjusted to less than a smaller one.
    adjusted_p = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values)[order] * factors))
    result = np.empty(len(p_values))
    result[order] = adjusted_p
    return [float(p) for p in result]
