"""Aggregation as one weight per token: `sum(weights * loss)` is the aggregate under any split.

These functions run on the host over a whole minibatch. They take NumPy or JAX arrays and return
NumPy float32 arrays.
"""

from __future__ import annotations

import jax
import numpy as np

from jax_ragrl.types import Tensor


def token_mean_weights(mask: Tensor) -> np.ndarray:
    """Returns the weights of the mean over all tokens of `mask`: long answers weigh more.

    `mask` is bool and may have any shape.
    """
    mask = jax.device_get(mask)
    return (mask / max(mask.sum(), 1)).astype(np.float32)


def sequence_mean_weights(mask_AT: Tensor) -> np.ndarray:
    """Returns the weights of the mean over sequences of their token means, float32 `[A, T]`.

    Sequences without tokens do not count.
    """
    mask_AT = jax.device_get(mask_AT)
    tokens_A = mask_AT.sum(axis=1)
    sequences = max(np.count_nonzero(tokens_A), 1)
    return (mask_AT / (sequences * np.maximum(tokens_A, 1)[:, None])).astype(np.float32)


def role_sum_weights(mask_AT: Tensor, role_A: Tensor) -> np.ndarray:
    """Returns the weights of a sum over roles of their token means, float32 `[A, T]`.

    C-3PO adds the losses of its roles (eq. 8), but writes each as a sum over tokens (eq. 9). Roles
    without tokens contribute 0. `role_A` is int32, the role of each action.
    """
    mask_AT, role_A = jax.device_get((mask_AT, role_A))
    # Float64 on the host: counts of large batches are exact.
    tokens_Z = np.bincount(role_A, mask_AT.sum(axis=1))
    return (mask_AT / np.maximum(tokens_Z, 1)[role_A][:, None]).astype(np.float32)
