import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.losses import kl_k1, kl_k2, kl_k3
from tests.losses.arrays import by_token, draws, put

LOGITS = np.array([0.3, -1.0, 0.8, 0.1])
Q = np.array([0.4, 0.3, 0.2, 0.1])


def k3(logp, ref, clamp=10.0):
    return min(math.exp(ref - logp) - 1 - (ref - logp), clamp)


@pytest.mark.parametrize(
    ("estimate", "formula"),
    [(kl_k1, lambda p, ref: p - ref), (kl_k2, lambda p, ref: (p - ref) ** 2 / 2), (kl_k3, k3)],
)
def test_the_estimates_equal_their_equations(estimate, formula):
    logp, ref, mask = draws(0, 2)
    expected = by_token(formula, mask, 2 * logp, 2 * ref)
    actual = estimate(*put(2 * logp, 2 * ref, mask))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clamp", [0.5, 3.0, 10.0])
def test_k3_has_no_gradient_at_its_clamp(clamp):
    gap = np.array([-300.0, -20.0, -clamp - 0.5, -0.7, 0.0, 0.7, clamp + 0.5, 20.0, 300.0])
    logp, ref, mask = np.zeros_like(gap), gap, np.ones(gap.shape, bool)
    expected = by_token(lambda p, r: k3(p, min(r, 50.0), clamp), mask, logp, ref)
    logp, ref, mask = put(logp, ref, mask)
    value, back = jax.vjp(lambda x: kl_k3(x, ref, mask, clamp=clamp), logp)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
    (grad,) = back(jnp.ones_like(value))
    bound = expected == clamp
    assert bound.any() and not np.asarray(grad)[bound].any()
    np.testing.assert_allclose(np.asarray(grad)[~bound], 1 - np.exp(gap[~bound]), rtol=1e-4)


def mean_gradient(estimate) -> np.ndarray:
    """Returns the mean gradient by the logits of the estimate as a loss on sampled tokens."""
    logits, ref, mask = put(LOGITS, np.log(Q), [True] * 4)

    def loss(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * estimate(logp, ref, mask))

    return np.asarray(jax.grad(loss)(logits))


def test_the_mean_gradients_are_zero_and_of_the_divergence_and_of_its_reverse():
    p = np.exp(LOGITS) / np.exp(LOGITS).sum()
    ratio = np.log(p / Q)
    np.testing.assert_allclose(mean_gradient(kl_k1), np.zeros(4), atol=1e-6)
    # d KL(p | q) / d logits = p (log p/q - KL), d KL(q | p) / d logits = p - q
    np.testing.assert_allclose(mean_gradient(kl_k2), p * (ratio - p @ ratio), rtol=1e-4)
    np.testing.assert_allclose(mean_gradient(kl_k3), p - Q, rtol=1e-4)
