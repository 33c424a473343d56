"""Exact inner-product search on the accelerators: a matrix product and a top-k per device.

Each device returns the best hits of its own vectors and the host merges them: no device waits for
another, so that a search can run concurrently with a sampler on the same devices. A device scans
its vectors in blocks with a running top-k, so that a call needs the memory of queries x block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.topology import is_gpu

SCORE_BYTES = 1 << 29  # upper bound of the score matrix of one call
MIN_QUERIES, MAX_QUERIES = 8, 256
# Scores are rounded to multiples of 2^-20 before they are compared: the last bits of a product
# depend on batch and device, and must not decide between equal passages. Above 8 the grid is finer
# than float32.
GRID = float(1 << 20)
BLOCK = 128  # passages per block of the two-stage top-k
# Passages per block of the scan: large enough to keep a device busy. A block of a GPU has several
# kernels of 70 us whatever its size: an H100 searches two million passages for 256 queries in
# 9.4 ms with blocks of 2^16 passages, and in 6.7 ms with 2^18.
STREAM, GPU_STREAM = 1 << 16, 1 << 18
PART = 1 << 16  # vectors per device below which another device costs more than it saves


class Quantized(NamedTuple):
    """Vectors in eight bits: vector x is about `scale_X1[x] * codes_XD[x]`."""

    codes_XD: Any  # int8
    scale_X1: Any  # float32


Vectors = Array | Quantized


@in_order
@functools.partial(jax.jit, static_argnames=("k", "stream"))
def nearest(
    queries_QD: Array, passages_XD: Vectors, count: Array, k: int, stream: int = STREAM
) -> tuple[Array, Array]:
    """Returns the k largest inner products per query.

    Args:
      queries_QD: float32.
      passages_XD: float32 or bfloat16, and queries are cast to that dtype; or `Quantized`. Sums are
        float32.
      count: int32 scalar, the number of passages; rows from `count` on are padding.
      stream: static, the passages that are scored at once.

    Returns:
      scores_QK float32, descending, -inf for padding; index_QK int32. Ties are ordered by index.
    """
    size = jax.tree.leaves(passages_XD)[0].shape[0]

    def best(start: Array | int, rows: Vectors) -> tuple[Array, Array]:
        scores_QX = _scores(queries_QD, rows, count - start)
        scores_QK, index_QK = top(scores_QX, min(k, scores_QX.shape[1]))
        return scores_QK, index_QK + start

    if size <= stream or k > stream:
        return best(0, passages_XD)
    return _scan(best, passages_XD, stream, k)


def _scan(
    best: Callable[[Array | int, Vectors], tuple[Array, Array]],
    passages: Vectors,
    stream: int,
    k: int,
) -> tuple[Array, Array]:
    def rows(start: Array | int, length: int) -> Vectors:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length), passages)

    def step(hits: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        return _merge(hits, best(start, rows(start, stream)), k), None

    blocks, rest = divmod(jax.tree.leaves(passages)[0].shape[0], stream)
    starts = stream * jnp.arange(1, blocks, dtype=jnp.int32)
    hits, _ = jax.lax.scan(step, best(0, rows(0, stream)), starts)
    last = blocks * stream
    return _merge(hits, best(last, rows(last, rest)), k) if rest else hits


def _merge(first: tuple[Array, Array], second: tuple[Array, Array], k: int) -> tuple[Array, Array]:
    scores, index = (jnp.concatenate(x, axis=1) for x in zip(first, second, strict=True))
    scores_QK, at_QK = jax.lax.top_k(scores, k)
    return scores_QK, jnp.take_along_axis(index, at_QK, axis=1)


def _scores(queries_QD: Array, passages: Vectors, count: Array) -> Array:
    """Returns the inner products on the grid, float32 [Q, X]; -inf for rows from `count` on."""
    scale_X1: Array | None = None
    if isinstance(passages, Quantized):
        rows_XD = jnp.asarray(passages.codes_XD).astype(jnp.float32)
        scale_X1 = jnp.asarray(passages.scale_X1)
    else:
        rows_XD = passages
    # The default precision of a TPU or GPU rounds float32 products to bfloat16 or TF32.
    precision = jax.lax.Precision.HIGHEST
    scores_QX = jnp.einsum(
        "qd,xd->qx",
        queries_QD.astype(rows_XD.dtype),
        rows_XD,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    if scale_X1 is not None:
        scores_QX = scores_QX * scale_X1.T
    is_passage_X = jnp.arange(rows_XD.shape[0], dtype=count.dtype) < count
    return jnp.where(is_passage_X[None], jnp.round(scores_QX * GRID) / GRID, -jnp.inf)


def top(scores_QX: Array, k: int) -> tuple[Array, Array]:
    """Computes `jax.lax.top_k` along the last axis without sorting all of it.

    1. Take the best score of each block. 2. Keep the k blocks with the best scores: they contain
    the k best entries, because each other block has k blocks before it with a better score, or an
    equal one at a lower index. 3. Search within these blocks.
    """
    count, size = scores_QX.shape
    blocks = -(-size // BLOCK)
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


def padded(count: int) -> int:
    """Returns the number of rows of `count` vectors on a device, a multiple of `BLOCK`."""
    return count + -count % BLOCK


def pad_to_blocks(vectors_XD: np.ndarray) -> np.ndarray:
    """Appends zero rows up to a multiple of `BLOCK`.

    Otherwise XLA moves the padding of `top` in front of the product, and then every call copies all
    vectors: 8 GB more traffic per call, and 4 GB more memory, for 21 million passages on 8 GPUs.
    """
    missing = padded(len(vectors_XD)) - len(vectors_XD)
    return np.pad(vectors_XD, ((0, missing), (0, 0))) if missing else vectors_XD


def bucket(n: int, low: int, high: int) -> int:
    """Rounds n up to a power of two between `low` and `high`, so that few shapes are compiled."""
    return min(max(low, 1 << (n - 1).bit_length()), high)


def by_score(scores_QK: np.ndarray, index_QK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts both arrays by descending score, then by index; missing hits (-inf) come last."""
    order_QK = np.lexsort((index_QK, -scores_QK))
    return np.take_along_axis(scores_QK, order_QK, 1), np.take_along_axis(index_QK, order_QK, 1)


def share_of_first(count: int, devices: int) -> int:
    """Returns how many of `count` vectors the first device holds."""
    return -(-count // min(devices, max(1, count // PART)))


def stream_rows(device: Any) -> int:
    """Returns the passages of a block of the scan on a device, which may be a described one."""
    return GPU_STREAM if is_gpu(device) else STREAM


def most_queries(size: int, stream: int) -> int:
    """Returns the most queries, a power of two, whose scores of a block fit `SCORE_BYTES`."""
    room = SCORE_BYTES // (4 * min(size, stream))
    return min(MAX_QUERIES, 1 << max(room.bit_length() - 1, 0))


class ExactSearcher:
    """Exact search over vectors on the devices of this process; few vectors use one device."""

    def __init__(self, vectors_XD: Any, scale_X1: Any = None):
        """Divides the vectors (float32, bfloat16, or codes with scales) among the devices.

        They get them with the first search; of a `MappedArray` the host holds one part at a time.
        """
        count = vectors_XD.shape[0]
        # Few vectors stay on few devices: each further device adds the overhead of a call.
        self._devices = jax.local_devices()[: max(1, count // PART)]
        size, more = divmod(count, len(self._devices))
        self._sizes = [size + (n < more) for n in range(len(self._devices))]
        self._starts = np.cumsum([0, *self._sizes], dtype=np.int32)
        self._stream = stream_rows(self._devices[0])
        self._most = most_queries(self._sizes[0], self._stream)
        self._vectors, self._scales = vectors_XD, scale_X1
        self._lock = threading.Lock()

    @functools.cached_property
    def _parts(self) -> list[tuple[Any, Array]]:
        """The vectors of each device, and their number."""
        parts = []
        for start, size, at in zip(self._starts.tolist(), self._sizes, self._devices, strict=False):
            rows = slice(start, start + size)
            part: Any = pad_to_blocks(np.asarray(self._vectors[rows]))
            if self._scales is not None:
                part = Quantized(part, pad_to_blocks(np.asarray(self._scales[rows])))
            parts.append((jax.device_put(part, at), jax.device_put(np.int32(size), at)))
        self._vectors = self._scales = None  # frees those in memory
        return parts

    def _batch(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        rows = bucket(len(queries_QD), min(MIN_QUERIES, self._most), self._most)
        padded_QD = np.zeros((rows, queries_QD.shape[1]), np.float32)
        padded_QD[: len(queries_QD)] = queries_QD
        with self._lock:  # several threads search, and one of them loads the vectors
            parts_of_devices = self._parts
        shares = zip(parts_of_devices, self._sizes, self._devices, strict=True)
        # The calls are asynchronous: all devices compute before the first result is read.
        results = [
            nearest(
                jax.device_put(padded_QD, device),
                x,
                count,
                k=bucket(k, MIN_QUERIES, padded(n)),
                stream=self._stream,
            )
            for (x, count), n, device in shares
        ]
        starts = zip(jax.device_get(results), self._starts[:-1], strict=True)
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
