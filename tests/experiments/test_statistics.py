"""Laws of the statistics of experiments."""

import itertools

import numpy as np
import pytest

from jax_ragrl.experiments.statistics import detectable_difference, holm, seed_test, sign_flip_test


def test_a_detectable_difference_is_found_in_four_of_five_experiments():
    """Means of 100 normal values: the interval of each experiment, at the difference it names."""
    rng = np.random.default_rng(0)
    error = 1 / np.sqrt(100)
    difference = detectable_difference(-1.96 * error, 1.96 * error)
    means = rng.normal(difference, error, 20_000)
    assert np.mean(means > 1.96 * error) == pytest.approx(0.8, abs=0.01)


def test_the_sign_flip_test_equals_the_exact_one():
    """Of all 2^8 signs, counted here, those whose sum is as extreme as the observed one."""
    x_Q = np.array([0.5, 1.0, -0.25, 0.75, 0.1, 0.3, -0.1, 0.6])
    sums = [abs(np.dot(signs, x_Q)) for signs in itertools.product((-1, 1), repeat=8)]
    exact = np.mean(np.array(sums) >= abs(x_Q.sum()) - 1e-9)
    assert sign_flip_test(x_Q) == pytest.approx(exact, abs=0.01)


def test_equal_arms_are_never_significant_and_p_is_never_zero():
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
