"""Aggregation as a weight a token: `sum(weights * loss)` is the aggregate, however it is split.

Host functions over a whole minibatch, NumPy or JAX in, NumPy float32 out.
"""

from __future__ import annotations

import jax
import numpy as np

from jax_ragrl.types import Tensor


def token_mean_weights(mask: Tensor) -> np.ndarray:
    """The mean over all tokens that `mask` keeps: long answers weigh more. Any shape."""
    mask = jax.device_get(mask)
    return (mask / max(mask.sum(), 1)).astype(np.float32)


def sequence_mean_weights(mask_AT: Tensor) -> np.ndarray:
    """The mean over sequences of their token means; an empty sequence is no sequence, `[A, T]`."""
    mask_AT = jax.device_get(mask_AT)
    tokens_A = mask_AT.sum(axis=1)
    sequences = max(np.count_nonzero(tokens_A), 1)
    return (mask_AT / (sequences * np.maximum(tokens_A, 1)[:, None])).astype(np.float32)


def role_sum_weights(mask_AT: Tensor, role_A: Tensor, role_weight_Z: Tensor) -> np.ndarray:
    """The sum over roles `z` of `role_weight_Z[z]` times the role's token mean, `[A, T]`.

    C-3PO, App. A.1, is all weights one. A role that wrote nothing adds nothing.
    """
    mask_AT, role_A, role_weight_Z = jax.device_get((mask_AT, role_A, role_weight_Z))
    tokens_Z = np.zeros(len(role_weight_Z))
    np.add.at(tokens_Z, role_A, mask_AT.sum(axis=1))
    scale_Z = np.asarray(role_weight_Z) / np.maximum(tokens_Z, 1)
    return (mask_AT * scale_Z[role_A][:, None]).astype(np.float32)
