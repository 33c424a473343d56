import math

import pytest

from jax_ragrl.credit.kl import adapt


@pytest.mark.parametrize(
    ("coefficient", "kl", "batch", "expected"),
    [
        # error: clip(kl / 6 - 1, -0.2, 0.2), then coefficient (1 + error batch / 10000)
        (0.2, 6.0, 128, 0.2),
        (0.2, 6.6, 100, 0.2002),
        (0.2, 5.4, 100, 0.1998),
        (0.2, 60.0, 500, 0.202),
        (0.2, 0.0, 500, 0.198),
        (0.2, -3.0, 500, 0.198),
        (0.2, math.inf, 500, 0.202),
        (0.2, math.nan, 500, 0.2),
        (0.0501, 0.0, 500, 0.05),  # the floor
        (0.01, 6.0, 500, 0.05),
    ],
)
def test_the_next_coefficient_equals_the_hand_computed_one(coefficient, kl, batch, expected):
    assert adapt(coefficient, kl, batch) == pytest.approx(expected, rel=1e-12)


def test_target_horizon_floor_and_ceiling_are_respected():
    assert adapt(1.0, 0.11, 10, target=0.1, horizon=100, floor=0.0) == pytest.approx(1.01)
    assert adapt(1.0, 0.0, 100, target=0.1, horizon=100, floor=0.9) == 0.9
    assert adapt(0.5, 12.0, 384, ceiling=0.2) == adapt(0.2, 12.0, 384, ceiling=0.2) == 0.2
