"""Helpers of the tests of losses."""

import jax
import numpy as np


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
