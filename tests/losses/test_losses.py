"""Losses equal their equations in float64, and masked values reach none of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl import losses
from jax_ragrl.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    dpo_loss,
    dual_clipped_policy_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    role_sum_weights,
    sequence_mean_weights,
    token_mean_weights,
    truncated_importance_weight,
    value_loss,
)


def put(*rows):
    """Puts arrays on the device: bools stay bools, numbers become float32."""
    arrays = [np.array(row) for row in rows]
    return jax.device_put([a if a.dtype == bool else a.astype(np.float32) for a in arrays])


def draws(seed: int, count: int, shape: tuple[int, ...] = (3, 5)):
    """Returns `count` arrays of normal draws, float64, and a random mask."""
    rng = np.random.default_rng(seed)
    return [*rng.normal(size=(count, *shape)), rng.random(shape) < 0.7]


def by_token(formula, mask, *arrays):
    """Applies `formula` to each token of the mask in float64; 0 elsewhere."""
    out = np.zeros(mask.shape)
    for at in np.ndindex(mask.shape):
        if mask[at]:
            out[at] = formula(*(float(a[at]) for a in arrays))
    return out


# As in an update: ratios on both sides of every bound, advantages of both signs.
RATIOS = (0.1, 0.5, 0.75, 0.85, 1.0, 1.1, 1.25, 1.5, 2.5, 4.0, 9.0)
PAIRS = [(r, a) for r in RATIOS for a in (-2.0, -0.3, 0.0, 0.3, 2.0)]
CLIPS = [{}, {"eps_low": 0.1}, {"eps_high": 0.28}, {"eps_low": 0.3, "eps_high": 0.6}]


def clipped(logp, old, advantage, eps_low=0.2, eps_high=0.2):
    """Schulman et al. 2017, eq. 7."""
    ratio = math.exp(logp - old)
    inside = min(max(ratio, 1 - eps_low), 1 + eps_high)
    return -min(ratio * advantage, inside * advantage)


def dual_clipped(logp, old, advantage, dual_clip=3.0, **clips):
    """Ye et al. 2020, eq. 5."""
    gain = -clipped(logp, old, advantage, **clips)
    return -max(gain, dual_clip * advantage) if advantage < 0 else -gain


def pairs():
    ratio, advantage = np.array(PAIRS).T
    old = -1.5 + np.zeros_like(ratio)
    return np.log(ratio) + old, old, advantage, np.ones(len(ratio), bool)


@pytest.mark.parametrize(
    ("loss", "formula", "clips"),
    [
        *((clipped_policy_loss, clipped, clips) for clips in CLIPS),
        *((dual_clipped_policy_loss, dual_clipped, clips) for clips in CLIPS),
        *((dual_clipped_policy_loss, dual_clipped, {"dual_clip": x}) for x in (1.5, 100.0)),
    ],
)
def test_the_policy_losses_equal_their_equations(loss, formula, clips):
    *arrays, mask = pairs()
    expected = by_token(lambda *x: formula(*x, **clips), mask, *arrays)
    np.testing.assert_allclose(loss(*put(*arrays, mask), **clips), expected, rtol=1e-5)


def test_a_token_past_the_dual_bound_has_no_gradient():
    arrays = put(np.log([2.5, 4.0]), [0.0, 0.0], [-1.0, -1.0], [True, True])
    grad = jax.grad(lambda x: dual_clipped_policy_loss(x, *arrays[1:]).sum())(arrays[0])
    np.testing.assert_allclose(grad, [2.5, 0.0], rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cap": 0.5}, {"cap": 1.5}])
def test_an_importance_weight_is_the_capped_ratio_without_a_gradient(options):
    behaviour, old, mask = draws(1, 2)
    cap = options.get("cap", 2.0)
    expected = by_token(lambda b, o: min(math.exp(o - b), cap), mask, behaviour, old)
    assert expected.max() == cap
    arrays = put(behaviour, old, mask)
    np.testing.assert_allclose(truncated_importance_weight(*arrays, **options), expected, rtol=1e-5)
    for at in (0, 1):
        grad = jax.grad(lambda *x: truncated_importance_weight(*x, **options).sum(), at)(*arrays)
        assert not np.any(grad)


@pytest.mark.parametrize("gap", [-300.0, 300.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_no_ratio_overflows(gap, advantage):
    old, at, mask = put([0.0], [advantage], [True])
    for loss in (clipped_policy_loss, dual_clipped_policy_loss):
        value, grad = jax.value_and_grad(lambda x, loss=loss: loss(x, old, at, mask).sum())(
            old + gap
        )
        assert np.isfinite(value) and np.isfinite(grad).all()
    assert np.isfinite(truncated_importance_weight(old, old + gap, mask)).all()


def clipped_value(value, old, target, clip=0.2):
    near = old + min(max(value - old, -clip), clip)
    return max((value - target) ** 2, (near - target) ** 2) / 2


@pytest.mark.parametrize("clips", [{}, {"clip": 0.5}, {"clip": 10.0}])
def test_the_value_losses_equal_their_equations(clips):
    *arrays, mask = draws(0, 3)
    expected = by_token(lambda *x: clipped_value(*x, **clips), mask, *arrays)
    actual = clipped_value_loss(*put(*arrays, mask), **clips)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    value, _, target = arrays
    expected = by_token(lambda v, g: (v - g) ** 2 / 2, mask, value, target)
    np.testing.assert_allclose(value_loss(*put(value, target, mask)), expected, rtol=1e-5)


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


@pytest.mark.parametrize("options", [{}, {"beta": 0.5}, {"beta": 2.0}])
def test_the_preference_loss_equals_its_equation(options):
    chosen, rejected, ref_chosen, ref_rejected, _ = draws(0, 4, (6,))
    beta = options.get("beta", 0.1)
    expected = []
    for c, r, rc, rr in zip(chosen, rejected, ref_chosen, ref_rejected, strict=True):
        reward_c, reward_r = beta * (c - rc), beta * (r - rr)
        expected.append(-math.log(1 / (1 + math.exp(-(reward_c - reward_r)))))
    actual = dpo_loss(*put(chosen, rejected, ref_chosen, ref_rejected), **options)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_badly_ordered_pair_has_finite_loss_and_full_slope():
    chosen, rejected = put([-5000.0], [5000.0])
    zero = chosen * 0
    loss, slope = jax.value_and_grad(lambda x: dpo_loss(x, rejected, zero, zero).sum())(chosen)
    np.testing.assert_allclose([loss, slope[0]], [1000.0, -0.1], rtol=1e-6)


# Each loss with the number of arrays before the mask.
LOSSES = [
    (losses.clipped_policy_loss, 3),
    (losses.dual_clipped_policy_loss, 3),
    (losses.policy_gradient_loss, 2),
    (losses.clipped_value_loss, 3),
    (losses.value_loss, 2),
    (losses.kl_k1, 2),
    (losses.kl_k2, 2),
    (losses.kl_k3, 2),
    (losses.truncated_importance_weight, 2),
]


@pytest.mark.parametrize(("loss", "count"), LOSSES)
@pytest.mark.parametrize("padding", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_values_never_reach_loss_or_gradient(loss, count, padding):
    """Each array, and all of them together, may hold any value outside the mask."""
    for spoiled in (*([i] for i in range(count)), range(count)):
        rows = [[-1.0 - i, padding if i in spoiled else 0.5 * i] for i in range(count)]
        *arrays, mask = put(*rows, [True, False])
        total = lambda *x: loss(*x, mask).sum()  # noqa: E731, B023
        grads = jax.grad(total, tuple(range(count)))(*arrays)
        alone = [x[:1] for x in arrays]
        own = jax.grad(lambda *x: loss(*x, mask[:1]).sum(), tuple(range(count)))(*alone)  # noqa: B023
        np.testing.assert_array_equal(loss(*arrays, mask), [*loss(*alone, mask[:1]), 0.0])
        for grad, expected in zip(grads, own, strict=True):
            np.testing.assert_array_equal(grad, [*expected, 0.0])


@pytest.mark.parametrize(("loss", "count"), LOSSES)
def test_different_shapes_are_refused(loss, count):
    a, b, mask = put([1.0], [1.0, 2.0], [True])
    with pytest.raises(AssertionError):
        loss(b, *[a] * (count - 1), mask)


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
