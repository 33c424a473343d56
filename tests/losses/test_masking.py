"""Laws of masks that every loss obeys."""

import jax
import numpy as np
import pytest

from jax_ragrl import losses
from tests.losses.arrays import put

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
