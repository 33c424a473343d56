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
