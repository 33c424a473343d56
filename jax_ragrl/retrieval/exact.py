"""Exact inner-product search on the accelerator: one matrix product and a top-k."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

SCORE_BYTES = 1 << 29  # the score matrix of one call
MIN_QUERIES, MAX_QUERIES = 8, 256
# Scores are compared on a grid of 2^-20: the last bits of a product depend on the batch and on the
# device, and must not decide between equal passages. Above 8 the grid is finer than float32.
GRID = float(1 << 20)


@functools.partial(jax.jit, static_argnames="k")
def nearest(queries_QD: Array, passages_XD: Array, k: int) -> tuple[Array, Array]:
    """The k largest inner products of each query.

    Args:
      queries_QD, passages_XD: float32.
      k: static, at most X.

    Returns:
      scores_QK float32, descending; index_QK int32. Of equal scores the lower index comes first.
    """
    exactly = jax.lax.Precision.HIGHEST
    scores_QX = jnp.einsum("qd,xd->qx", queries_QD, passages_XD, precision=exactly)
    return jax.lax.top_k(jnp.round(scores_QX * GRID) / GRID, k)


def bucket(n: int, low: int, high: int) -> int:
    """The smallest power of two from `low` that holds n, at most `high`: few compilations."""
    return min(max(low, 1 << (n - 1).bit_length()), high)


class ExactSearcher:
    """Holds the vectors on the default device."""

    def __init__(self, vectors_XD: np.ndarray):
        """Args: float32 [X, D]."""
        self._vectors_XD = jax.device_put(np.asarray(vectors_XD, np.float32))
        room = SCORE_BYTES // (4 * len(vectors_XD))
        # The largest power of two with room for its scores: batches are padded to one.
        self._most = min(MAX_QUERIES, 1 << max(room.bit_length() - 1, 0))

    def _batch(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        rows = bucket(len(queries_QD), min(MIN_QUERIES, self._most), self._most)
        padded_QD = np.zeros((rows, queries_QD.shape[1]), np.float32)
        padded_QD[: len(queries_QD)] = queries_QD
        depth = bucket(k, MIN_QUERIES, len(self._vectors_XD))
        found = jax.device_get(nearest(jax.device_put(padded_QD), self._vectors_XD, depth))
        scores_QK, index_QK = (array[: len(queries_QD), :k] for array in found)
        return scores_QK, index_QK

    def search(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores_QK float32, index_QK int32) of float32 [Q, D]; Q at least 1, 1 <= k <= X."""
        starts = range(0, len(queries_QD), self._most)
        parts = [self._batch(queries_QD[start : start + self._most], k) for start in starts]
        scores, index = zip(*parts, strict=True)
        return np.concatenate(scores), np.concatenate(index)
