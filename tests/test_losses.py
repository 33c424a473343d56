from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.losses import clipped_policy_loss, clipped_value_loss, kl_k1, mean_over, role_sum


def put(*rows):
    """Arrays on the device: bools stay bools, numbers become float32."""
    arrays = [np.array(row) for row in rows]
    return jax.device_put([a if a.dtype == bool else a.astype(np.float32) for a in arrays])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # ratio, advantage, -min(r A, clip(r) A), and its derivative by logp: -r A unless clipped.
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_the_policy_loss_has_its_hand_computed_value_and_slope(ratio, advantage, loss, slope):
    arrays = put([np.log(ratio) - 1.5], [-1.5], [advantage], [True])
    found, grad = jax.value_and_grad(lambda logp: clipped_policy_loss(logp, *arrays[1:]).sum())(
        arrays[0]
    )
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(grad, [slope], rtol=1e-5, atol=1e-6)


def test_the_clip_range_is_the_one_given():
    arrays = put([np.log(1.5)], [0.0], [1.0], [True])
    np.testing.assert_allclose(clipped_policy_loss(*arrays, eps=0.4), [-1.4], rtol=1e-6)
    np.testing.assert_allclose(clipped_policy_loss(*arrays, eps=0.6), [-1.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # within the clip: (V - G)^2 / 2
        (1.5, 1.0, 3.0, 1.62, 0.0),  # moved past the clip towards the target: held at 1.2
        (0.5, 1.0, 3.0, 3.125, -2.5),  # moved away: the unclipped error is the larger
        (1.1, 1.0, 1.0, 0.005, 0.1),
    ],
)
def test_the_value_loss_has_its_hand_computed_value_and_slope(value, old, target, loss, slope):
    arrays = put([value], [old], [target], [True])
    found, grad = jax.value_and_grad(lambda v: clipped_value_loss(v, *arrays[1:]).sum())(arrays[0])
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(grad, [slope], rtol=1e-5, atol=1e-6)


def test_k1_is_the_log_ratio():
    found = kl_k1(*put([-1.0, -3.0], [-1.5, -2.0], [True, True]))
    np.testing.assert_allclose(found, [0.5, -1.0])


def test_k1_estimates_the_divergence_without_bias():
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.4, 0.4, 0.2])
    each = kl_k1(*put(np.log(p), np.log(q), [True] * 3))
    np.testing.assert_allclose(np.sum(p * np.asarray(each)), np.sum(p * np.log(p / q)), rtol=1e-5)


def test_a_mean_over_nothing_is_zero():
    x, mask = put([[2.0, 4.0], [np.nan, 8.0]], [[True, True], [False, False]])
    assert mean_over(x, mask) == 3.0
    assert mean_over(x, mask & ~mask) == 0.0


def test_each_role_weighs_the_same_in_a_role_sum():
    x_RT, mask_RT = put(
        [[1.0, 3.0, 9.0], [10.0, np.nan, np.nan]], [[True, True, False], [True, False, False]]
    )
    role_RT = jax.device_put(np.array([[0, 0, 0], [2, 2, 2]], np.int32))
    assert role_sum(x_RT, role_RT, mask_RT, 3) == 2.0 + 0.0 + 10.0


NAN = np.nan
LOSSES = {
    "policy": lambda x, mask: clipped_policy_loss(x, x, jnp.ones_like(x), mask).sum(),
    "policy_old": lambda x, mask: clipped_policy_loss(
        jnp.zeros_like(x), x, jnp.ones_like(x), mask
    ).sum(),
    "policy_advantage": lambda x, mask: clipped_policy_loss(x, x, x, mask).sum(),
    "value": lambda x, mask: clipped_value_loss(x, x, x, mask).sum(),
    "k1": lambda x, mask: kl_k1(x, jnp.zeros_like(x), mask).sum(),
    "mean": mean_over,
    "role_sum": lambda x, mask: role_sum(x, jnp.zeros(x.shape, jnp.int32), mask, 2),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("padding", [NAN, np.inf, -np.inf, 1e30])
def test_padding_never_reaches_the_gradient(name, padding):
    x, mask = put([[-1.0, padding]], [[True, False]])
    value, grad = jax.value_and_grad(LOSSES[name])(x, mask)
    alone, own = jax.value_and_grad(LOSSES[name])(x[:, :1], mask[:, :1])
    np.testing.assert_array_equal(value, alone)
    np.testing.assert_array_equal(grad, [[own[0, 0], 0.0]])


def test_on_policy_the_gradient_of_the_policy_loss_is_minus_the_advantage():
    logp_BT, advantage_BT, mask_BT = put([[-1.0, -2.0]], [[0.5, -3.0]], [[True, True]])
    old_BT = logp_BT
    grad_BT = jax.grad(lambda x: clipped_policy_loss(x, old_BT, advantage_BT, mask_BT).sum())(
        logp_BT
    )
    np.testing.assert_allclose(grad_BT, [[-0.5, 3.0]])


@pytest.mark.parametrize("loss", [clipped_policy_loss, clipped_value_loss])
def test_shapes_that_differ_are_refused(loss):
    a, b, mask = put([1.0], [1.0, 2.0], [True])
    with pytest.raises(AssertionError):
        loss(a, b, a, mask)
