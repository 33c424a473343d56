"""Laws of the statistics of experiments over seeds."""

import itertools

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.experiments.statistics import hierarchical_bootstrap, holm, sign_flip_test


def test_with_one_seed_the_interval_is_that_of_the_questions():
    """The standard error of a mean of n values is their standard deviation over sqrt(n)."""
    x_Q = np.random.default_rng(0).normal(0.3, 1.0, 400)
    estimate = hierarchical_bootstrap([x_Q])
    assert estimate.mean == pytest.approx(x_Q.mean())
    assert estimate.error == pytest.approx(x_Q.std() / 20, rel=0.03)
    assert estimate.low == pytest.approx(x_Q.mean() - 1.96 * estimate.error, abs=0.01)


def test_the_variance_between_seeds_widens_the_interval():
    """Seeds of means 0 and 1 without variance within: a resample has mean 0, 1/2 or 1."""
    estimate = hierarchical_bootstrap([np.zeros(100), np.ones(100)])
    assert (estimate.mean, estimate.low, estimate.high) == (0.5, 0.0, 1.0)
    assert estimate.error == pytest.approx(np.sqrt(1 / 8), rel=0.03)


def test_both_variances_add_up():
    """Var(mean) = (within / questions + between) / seeds, for resampled seeds and questions."""
    rng = np.random.default_rng(1)
    values = [rng.normal(center, 2.0, 200) for center in (0.0, 0.2, 0.7, 0.4)]
    between = np.var([x.mean() for x in values])
    within = np.mean([x.var() / 200 for x in values])
    expected = np.sqrt((within + between) / 4)
    assert hierarchical_bootstrap(values).error == pytest.approx(expected, rel=0.03)


def test_equal_inputs_give_equal_estimates():
    values = [np.random.default_rng(i).normal(size=50) for i in range(3)]
    assert hierarchical_bootstrap(values) == hierarchical_bootstrap(values)


def test_a_seed_without_scores_is_an_error():
    with pytest.raises(UserError, match="no scores"):
        hierarchical_bootstrap([np.ones(3), np.zeros(0)])


def test_the_sign_flip_test_equals_the_exact_one():
    """Of all 2^8 signs, counted here, those whose sum is as extreme as the observed one."""
    x_Q = np.array([0.5, 1.0, -0.25, 0.75, 0.1, 0.3, -0.1, 0.6])
    sums = [abs(np.dot(signs, x_Q)) for signs in itertools.product((-1, 1), repeat=8)]
    exact = np.mean(np.array(sums) >= abs(x_Q.sum()) - 1e-9)
    assert sign_flip_test(x_Q) == pytest.approx(exact, abs=0.01)


def test_equal_arms_are_never_significant_and_p_is_never_zero():
    assert sign_flip_test(np.zeros(5)) == 1.0
    assert 0 < sign_flip_test(np.ones(200)) < 2e-4


def test_holm_of_a_published_example():
    """Holm 1979: the k-th smallest of n is multiplied by n - k + 1, and made monotone."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
