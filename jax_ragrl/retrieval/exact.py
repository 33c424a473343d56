"""Exact inner-product search on the accelerators: a matrix product and a top-k on each.

The vectors are spread over the devices of this process. Each finds its own best and the host merges
them: no device waits for another, so that a search may run beside a sampler on all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

SCORE_BYTES = 1 << 29  # the score matrix of one call
MIN_QUERIES, MAX_QUERIES = 8, 256
# Scores are compared on a grid of 2^-20: the last bits of a product depend on the batch and on the
# device, and must not decide between equal passages. Above 8 the grid is finer than float32.
GRID = float(1 << 20)
BLOCK = 128  # passages whose best score stands for them
PART = 1 << 16  # vectors that are worth another device


@functools.partial(jax.jit, static_argnames="k")
def nearest(queries_QD: Array, passages_XD: Array, k: int) -> tuple[Array, Array]:
    """The k largest inner products of each query.

    Args:
      queries_QD: float32.
      passages_XD: float32 or bfloat16; queries are rounded to the same, products summed in float32.
      k: static, at most X.

    Returns:
      scores_QK float32, descending; index_QK int32. Of equal scores the lower index comes first.
    """
    exactly = jax.lax.Precision.HIGHEST
    scores_QX = jnp.einsum(
        "qd,xd->qx",
        queries_QD.astype(passages_XD.dtype),
        passages_XD,
        precision=exactly,
        preferred_element_type=jnp.float32,
    )
    return top(jnp.round(scores_QX * GRID) / GRID, k)


def top(scores_QX: Array, k: int) -> tuple[Array, Array]:
    """`jax.lax.top_k` along the last axis, without sorting all of it.

    The k best, of equal ones those with the lowest index, lie in the k blocks whose own best are
    the k best: before any other block there are k with something better, or as good and earlier.
    """
    count, size = scores_QX.shape
    blocks = -(-size // BLOCK)
    if blocks <= 2 * k:
        return jax.lax.top_k(scores_QX, k)
    padding = ((0, 0), (0, blocks * BLOCK - size))
    padded_QX = jnp.pad(scores_QX, padding, constant_values=-jnp.inf)
    scores_QBC = padded_QX.reshape(count, blocks, BLOCK)
    _, block_QK = jax.lax.top_k(jnp.max(scores_QBC, axis=2), k)
    block_QK = jnp.sort(block_QK, axis=1)  # again in order of the index
    near_QKC = jnp.take_along_axis(scores_QBC, block_QK[:, :, None], axis=1)
    scores_QK, at_QK = jax.lax.top_k(near_QKC.reshape(count, -1), k)
    first_QK = jnp.take_along_axis(block_QK, at_QK // BLOCK, axis=1) * BLOCK
    return scores_QK, first_QK + at_QK % BLOCK


def bucket(n: int, low: int, high: int) -> int:
    """The smallest power of two from `low` that holds n, at most `high`: few compilations."""
    return min(max(low, 1 << (n - 1).bit_length()), high)


def by_score(scores_QK: np.ndarray, index_QK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both in one order: by falling score, then by index; what is missing (-inf) comes last."""
    order_QK = np.lexsort((index_QK, -scores_QK))
    return np.take_along_axis(scores_QK, order_QK, 1), np.take_along_axis(index_QK, order_QK, 1)


def share_of_first(count: int, devices: int) -> int:
    """How many of so many vectors the first of the devices holds."""
    return -(-count // min(devices, max(1, count // PART)))


def most_queries(size: int) -> int:
    """How many queries one call takes to a device's vectors: the largest power of two with room for
    its scores, to which batches are padded."""
    room = SCORE_BYTES // (4 * size)
    return min(MAX_QUERIES, 1 << max(room.bit_length() - 1, 0))


class ExactSearcher:
    """Holds the vectors on the devices of this process, few on the first alone."""

    def __init__(self, vectors_XD: Any):
        """Args: float32 or bfloat16 [X, D], an array or a TensorStore, of which the host holds one
        device's part."""
        count = vectors_XD.shape[0]  # a TensorStore has no length
        devices = jax.local_devices()[: max(1, count // PART)]
        size, more = divmod(count, len(devices))
        sizes = [size + (n < more) for n in range(len(devices))]
        self._starts = np.cumsum([0, *sizes], dtype=np.int32)
        self._parts = [
            jax.device_put(np.asarray(vectors_XD[start : start + size]), device)
            for start, size, device in zip(self._starts.tolist(), sizes, devices, strict=False)
        ]
        self._most = most_queries(sizes[0])

    def _batch(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        rows = bucket(len(queries_QD), min(MIN_QUERIES, self._most), self._most)
        padded_QD = np.zeros((rows, queries_QD.shape[1]), np.float32)
        padded_QD[: len(queries_QD)] = queries_QD
        found = [
            nearest(jax.device_put(padded_QD, x.device), x, bucket(k, MIN_QUERIES, len(x)))
            for x in self._parts
        ]
        starts = zip(jax.device_get(found), self._starts[:-1], strict=True)
        parts = [(scores, index + start) for (scores, index), start in starts]
        scores, index = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
        scores_QK, index_QK = by_score(scores, index)
        return scores_QK[: len(queries_QD), :k], index_QK[: len(queries_QD), :k]

    def search(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores_QK float32, index_QK int32) of float32 [Q, D]; Q at least 1, 1 <= k <= X."""
        starts = range(0, len(queries_QD), self._most)
        parts = [self._batch(queries_QD[start : start + self._most], k) for start in starts]
        scores, index = zip(*parts, strict=True)
        return np.concatenate(scores), np.concatenate(index)
