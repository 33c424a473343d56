from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_ragrl.losses import role_sum_weights, sequence_mean_weights, token_mean_weights

MASK = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]], bool)
ROLE = np.array([0, 1, 2, 0, 2], np.int32)
LOSS = np.random.default_rng(0).normal(size=MASK.shape)


def losses_of(rows) -> list[float]:
    return [LOSS[a, t] for a in rows for t in range(MASK.shape[1]) if MASK[a, t]]


def total(weights: np.ndarray) -> float:
    assert weights.dtype == np.float32 and not weights[~MASK].any()
    return float((weights * LOSS).sum())


def test_token_weights_give_the_mean_of_all_tokens():
    tokens = losses_of(range(5))
    np.testing.assert_allclose(total(token_mean_weights(MASK)), sum(tokens) / 10, rtol=1e-6)


def test_sequence_weights_give_the_mean_of_sequence_means():
    means = [np.mean(losses_of([a])) for a in (0, 2, 3, 4)]
    np.testing.assert_allclose(total(sequence_mean_weights(MASK)), np.mean(means), rtol=1e-6)


@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [0.5, 9.0, 2.0], [0.0, 0.0, 1.0]])
def test_role_weights_give_the_weighted_sum_of_role_means(weight):
    # Role 1 has only an empty sequence: it contributes 0 with any weight.
    expected = weight[0] * np.mean(losses_of([0, 3])) + weight[2] * np.mean(losses_of([2, 4]))
    weights = role_sum_weights(MASK, ROLE, np.array(weight, np.float32))
    np.testing.assert_allclose(total(weights), expected, rtol=1e-6)


def test_one_role_of_weight_one_is_the_token_mean():
    one = np.ones(1, np.float32)
    weights = role_sum_weights(MASK, np.zeros_like(ROLE), one)
    np.testing.assert_allclose(weights, token_mean_weights(MASK), rtol=1e-6)


def test_weights_of_an_empty_mask_are_zero():
    empty = np.zeros_like(MASK)
    ones = np.ones(3, np.float32)
    for weights in (
        token_mean_weights(empty),
        sequence_mean_weights(empty),
        role_sum_weights(empty, ROLE, ones),
    ):
        assert not weights.any()


def test_arrays_on_the_device_have_the_same_weights():
    ones = np.ones(3, np.float32)
    mask, role, ones_Z = jax.device_put((MASK, ROLE, ones))
    for actual, expected in (
        (token_mean_weights(mask), token_mean_weights(MASK)),
        (sequence_mean_weights(mask), sequence_mean_weights(MASK)),
        (role_sum_weights(mask, role, ones_Z), role_sum_weights(MASK, ROLE, ones)),
    ):
        np.testing.assert_array_equal(actual, expected)
