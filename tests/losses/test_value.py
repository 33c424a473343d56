import jax
import numpy as np
import pytest

from jax_ragrl.losses import clipped_value_loss, value_loss
from tests.losses.arrays import by_token, draws, put


def clipped(value, old, target, clip=0.2):
    near = old + min(max(value - old, -clip), clip)
    return max((value - target) ** 2, (near - target) ** 2) / 2


@pytest.mark.parametrize("clips", [{}, {"clip": 0.5}, {"clip": 10.0}])
def test_the_clipped_value_loss_equals_its_equation(clips):
    *arrays, mask = draws(0, 3)
    expected = by_token(lambda *x: clipped(*x, **clips), mask, *arrays)
    actual = clipped_value_loss(*put(*arrays, mask), **clips)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_value_loss_is_half_the_squared_error():
    value, target, mask = draws(1, 2)
    expected = by_token(lambda v, g: (v - g) ** 2 / 2, mask, value, target)
    np.testing.assert_allclose(value_loss(*put(value, target, mask)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # within the clip: (V - G)^2 / 2
        (1.5, 1.0, 3.0, 1.62, 0.0),  # moved past the clip towards the target: held at 1.2
        (0.5, 1.0, 3.0, 3.125, -2.5),  # moved away: the unclipped error is the larger
        (1.1, 1.0, 1.0, 0.005, 0.1),
    ],
)
def test_the_value_loss_equals_hand_computed_values(value, old, target, loss, slope):
    arrays = put([value], [old], [target], [True])
    actual, grad = jax.value_and_grad(lambda v: clipped_value_loss(v, *arrays[1:]).sum())(arrays[0])
    np.testing.assert_allclose(actual, loss, rtol=1e-5)
    np.testing.assert_allclose(grad, [slope], rtol=1e-5, atol=1e-6)
