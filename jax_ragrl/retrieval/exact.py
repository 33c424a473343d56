"""Exact inner-product search on the accelerators: a matrix product and a top-k per device.

The vectors are divided among the devices of this process. Each device returns its own best hits and
the host merges them: no device waits for another, so that a search can run concurrently with a
sampler on the same devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

SCORE_BYTES = 1 << 29  # upper bound of the score matrix of one call
MIN_QUERIES, MAX_QUERIES = 8, 256
# Scores are rounded to multiples of 2^-20 before they are compared: the last bits of a product
# depend on batch and device, and must not decide between equal passages. Above 8 the grid is finer
# than float32.
GRID = float(1 << 20)
BLOCK = 128  # passages per block of the two-stage top-k
PART = 1 << 16  # vectors per device below which another device costs more than it saves


@functools.partial(jax.jit, static_argnames="k")
def nearest(queries_QD: Array, passages_XD: Array, count: Array, k: int) -> tuple[Array, Array]:
    """Returns the k largest inner products per query.

    Args:
      queries_QD: float32.
      passages_XD: float32 or bfloat16; queries are cast to that dtype, sums are float32.
      count: int32 scalar, the number of passages; rows from `count` on are padding.
      k: static, at most X.

    Returns:
      scores_QK float32, descending, -inf for padding; index_QK int32. Ties are ordered by index.
    """
    # The default precision of a TPU or GPU rounds float32 products to bfloat16 or TF32.
    precision = jax.lax.Precision.HIGHEST
    scores_QX = jnp.einsum(
        "qd,xd->qx",
        queries_QD.astype(passages_XD.dtype),
        passages_XD,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    is_passage_X = jnp.arange(passages_XD.shape[0], dtype=count.dtype) < count
    scores_QX = jnp.where(is_passage_X[None], jnp.round(scores_QX * GRID) / GRID, -jnp.inf)
    return top(scores_QX, k)


def top(scores_QX: Array, k: int) -> tuple[Array, Array]:
    """Computes `jax.lax.top_k` along the last axis without sorting all of it.

    1. Take the best score of each block. 2. Keep the k blocks with the best scores: they contain
    the k best entries, because each other block has k blocks before it with a better score, or an
    equal one at a lower index. 3. Search within these blocks.
    """
    count, size = scores_QX.shape
    blocks = -(-size // BLOCK)
    # With few blocks, the second stage would search most of the entries again.
    if blocks <= 2 * k:
        return jax.lax.top_k(scores_QX, k)
    if missing := blocks * BLOCK - size:
        scores_QX = jnp.pad(scores_QX, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    scores_QBC = scores_QX.reshape(count, blocks, BLOCK)
    _, block_QK = jax.lax.top_k(jnp.max(scores_QBC, axis=2), k)
    block_QK = jnp.sort(block_QK, axis=1)  # by index, so that ties go to the lowest one
    candidate_QKC = jnp.take_along_axis(scores_QBC, block_QK[:, :, None], axis=1)
    scores_QK, at_QK = jax.lax.top_k(candidate_QKC.reshape(count, -1), k)
    first_QK = jnp.take_along_axis(block_QK, at_QK // BLOCK, axis=1) * BLOCK
    return scores_QK, first_QK + at_QK % BLOCK


def pad_to_blocks(vectors_XD: np.ndarray) -> np.ndarray:
    """Appends zero rows up to a multiple of `BLOCK`.

    Otherwise XLA moves the padding of `top` in front of the product, and then every call copies all
    vectors: 8 GB more traffic per call, and 4 GB more memory, for 21 million passages on 8 GPUs.
    """
    missing = -len(vectors_XD) % BLOCK
    return np.pad(vectors_XD, ((0, missing), (0, 0))) if missing else vectors_XD


def bucket(n: int, low: int, high: int) -> int:
    """Rounds n up to a power of two between `low` and `high`, so that few shapes are compiled.

    Args:
      n: the size to round.
      low: smallest result.
      high: largest result.
    """
    return min(max(low, 1 << (n - 1).bit_length()), high)


def by_score(scores_QK: np.ndarray, index_QK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts both arrays by descending score, then by index; missing hits (-inf) come last."""
    order_QK = np.lexsort((index_QK, -scores_QK))
    return np.take_along_axis(scores_QK, order_QK, 1), np.take_along_axis(index_QK, order_QK, 1)


def share_of_first(count: int, devices: int) -> int:
    """Returns how many of `count` vectors the first device holds."""
    return -(-count // min(devices, max(1, count // PART)))


def most_queries(size: int) -> int:
    """Returns the number of queries per call for a device with `size` vectors.

    It is the largest power of two whose score matrix fits `SCORE_BYTES`; batches are padded to it.
    """
    room = SCORE_BYTES // (4 * size)
    return min(MAX_QUERIES, 1 << max(room.bit_length() - 1, 0))


class ExactSearcher:
    """Exact search over vectors on the devices of this process; few vectors use one device."""

    def __init__(self, vectors_XD: Any):
        """Copies the vectors to the devices.

        Args:
          vectors_XD: float32 or bfloat16, an array or a TensorStore; the host holds one device's
            part at a time.
        """
        count = vectors_XD.shape[0]  # a TensorStore has no length
        # Few vectors stay on few devices: each further device adds the overhead of a call.
        devices = jax.local_devices()[: max(1, count // PART)]
        size, more = divmod(count, len(devices))
        sizes = [size + (n < more) for n in range(len(devices))]
        self._starts = np.cumsum([0, *sizes], dtype=np.int32)
        starts = self._starts.tolist()
        self._parts = [
            jax.device_put(pad_to_blocks(np.asarray(vectors_XD[start : start + size])), device)
            for start, size, device in zip(starts, sizes, devices, strict=False)
        ]
        pairs = zip(sizes, devices, strict=True)
        self._counts = [jax.device_put(np.int32(size), device) for size, device in pairs]
        self._most = most_queries(sizes[0])

    def _batch(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        rows = bucket(len(queries_QD), min(MIN_QUERIES, self._most), self._most)
        padded_QD = np.zeros((rows, queries_QD.shape[1]), np.float32)
        padded_QD[: len(queries_QD)] = queries_QD
        # The calls are asynchronous: all devices compute before the first result is read.
        results = [
            nearest(jax.device_put(padded_QD, x.device), x, count, bucket(k, MIN_QUERIES, len(x)))
            for x, count in zip(self._parts, self._counts, strict=True)
        ]
        starts = zip(jax.device_get(results), self._starts[:-1], strict=True)
        # Each device counts its passages from 0.
        parts = [(scores, index + start) for (scores, index), start in starts]
        scores, index = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
        scores_QK, index_QK = by_score(scores, index)
        return scores_QK[: len(queries_QD), :k], index_QK[: len(queries_QD), :k]

    def search(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (scores_QK float32, index_QK int32) for float32 [Q, D]; Q >= 1, 1 <= k <= X."""
        starts = range(0, len(queries_QD), self._most)
        parts = [self._batch(queries_QD[start : start + self._most], k) for start in starts]
        scores, index = zip(*parts, strict=True)
        return np.concatenate(scores), np.concatenate(index)
