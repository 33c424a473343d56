"""What the tests of the losses share."""

from __future__ import annotations

import jax
import numpy as np


def put(*rows):
    """Arrays on the device: bools stay bools, numbers become float32."""
    arrays = [np.array(row) for row in rows]
    return jax.device_put([a if a.dtype == bool else a.astype(np.float32) for a in arrays])


def draws(seed: int, count: int, shape: tuple[int, ...] = (3, 5)):
    """`count` arrays of normal draws and a mask that keeps some, float64 and bool."""
    rng = np.random.default_rng(seed)
    return [*rng.normal(size=(count, *shape)), rng.random(shape) < 0.7]


def by_token(formula, mask, *arrays):
    """`formula` of each kept token, one at a time in float64; 0 where `mask` is False."""
    out = np.zeros(mask.shape)
    for at in np.ndindex(mask.shape):
        if mask[at]:
            out[at] = formula(*(float(a[at]) for a in arrays))
    return out
