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


def test_weights_give_the_mean_of_tokens_of_sequence_means_or_a_sum_over_roles():
    tokens = losses_of(range(5))
    np.testing.assert_allclose(total(token_mean_weights(MASK)), sum(tokens) / 10, rtol=1e-6)
    means = [np.mean(losses_of([a])) for a in (0, 2, 3, 4)]
    np.testing.assert_allclose(total(sequence_mean_weights(MASK)), np.mean(means), rtol=1e-6)
    # Role 1 has only an empty sequence: it contributes 0.
    expected = np.mean(losses_of([0, 3])) + np.mean(losses_of([2, 4]))
    np.testing.assert_allclose(total(role_sum_weights(MASK, ROLE)), expected, rtol=1e-6)


@pytest.mark.parametrize("weights", [token_mean_weights, sequence_mean_weights, role_sum_weights])
def test_an_empty_mask_has_weights_of_zero_and_devices_change_nothing(weights):
    more = [ROLE] if weights is role_sum_weights else []
    assert not weights(np.zeros_like(MASK), *more).any()
    np.testing.assert_array_equal(weights(*jax.device_put([MASK, *more])), weights(MASK, *more))
