"""Statistics of experiments over several seeds: intervals, tests and what could be seen.

Scores vary for two reasons: other questions, and other seeds. An interval over questions alone is
too narrow for a statement about a method, which would be trained with another seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_ragrl.errors import UserError

SAMPLES = 10_000
# Normal quantiles of a two-sided test at 5 % with a power of 80 %.
DETECTABLE_ERRORS = 1.96 + 0.84


class Estimate(NamedTuple):
    """A mean over seeds and questions.

    Fields:
      mean: the mean over seeds of the means over questions.
      low, high: its 95 % interval.
      error: its standard error.
    """

    mean: float
    low: float
    high: float
    error: float

    @property
    def detectable(self) -> float:
        """The smallest true mean that a test at 5 % would find in 80 % of such experiments."""
        return DETECTABLE_ERRORS * self.error


def hierarchical_bootstrap(
    values: Sequence[np.ndarray], samples: int = SAMPLES, seed: int = 0
) -> Estimate:
    """Estimates a mean by resampling seeds, and questions within each seed (Davison, Hinkley 1997).

    Args:
      values: one float64 array `[Q]` per seed, or `[Q]` differences of two arms; the number of
        questions may differ between seeds.
      samples: the number of resamples.
      seed: the seed of the resampling; equal inputs give equal estimates.

    Returns:
      The estimate, with a percentile interval. With one seed, the variance between seeds is unknown
      and the interval is over questions alone.

    Raises:
      UserError: there are no values.
    """
    if not values or not all(len(x) for x in values):
        raise UserError("there are no scores to compare: every question of a seed failed")
    rng = np.random.default_rng(seed)
    # Questions first: the mean of a seed in a resample is independent of the other seeds. A seed
    # that is drawn twice draws its questions twice, hence one column per position.
    seeds = len(values)
    chosen_SN = rng.integers(seeds, size=(samples, seeds))
    means_S = np.zeros(samples)
    for position in range(seeds):
        for number, x_Q in enumerate(values):
            rows = np.flatnonzero(chosen_SN[:, position] == number)
            draws = rng.integers(len(x_Q), size=(len(rows), len(x_Q)))
            means_S[rows] += x_Q[draws].mean(axis=1) / seeds
    low, high = np.quantile(means_S, (0.025, 0.975))
    mean = float(np.mean([x.mean() for x in values]))
    return Estimate(mean, float(low), float(high), float(means_S.std()))


def sign_flip_test(differences_Q: np.ndarray, samples: int = SAMPLES, seed: int = 0) -> float:
    """Returns the two-sided p-value of a mean difference by random sign flips (Fisher 1935).

    Under the hypothesis that two arms are equal, the sign of the difference of each question is
    random.

    Args:
      differences_Q: float64 `[Q]`, the mean difference of each question over seeds.
      samples: the number of random flips.
      seed: the seed of the flips.
    """
    rng = np.random.default_rng(seed)
    nonzero_Q = differences_Q[differences_Q != 0]  # others never change a sum
    observed = abs(nonzero_Q.sum())
    signs_SQ = rng.choice((-1.0, 1.0), size=(samples, len(nonzero_Q)))
    # The observed signs are one of the possible ones, so that a p-value is never 0. The tolerance
    # is for sums that are equal but for rounding.
    extreme = np.abs(signs_SQ @ nonzero_Q) >= observed - 1e-9
    return float((1 + extreme.sum()) / (1 + samples))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted for the number of comparisons (Holm 1979), in the given order."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    # A larger p-value is never adjusted to less than a smaller one.
    adjusted = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values)[order] * factors))
    result = np.empty(len(p_values))
    result[order] = adjusted
    return [float(p) for p in result]
