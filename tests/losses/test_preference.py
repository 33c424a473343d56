import math

import jax
import numpy as np
import pytest

from jax_ragrl.losses import dpo_loss
from tests.losses.arrays import draws, put


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
