"""Exact search over vectors in eight bits, whose best candidates are scored again in full.

A vector is stored as int8 codes and one scale, its largest entry / 127. The devices score the codes
of all passages; the host scores the best candidates again with their vectors, which are
memory-mapped and of which no others are read.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_ragrl.retrieval.exact import GRID, ExactSearcher, bucket, by_score
from jax_ragrl.retrieval.shards import MappedArray, ShardWriter, create, forget_progress, shards

CODES, SCALES = "codes", "scales"  # folders of an index
LEVELS = 127
# Per requested hit, and at least enough hits for the first pages of a query agree.
CANDIDATES, NEIGHBORS = 4, 64


def quantize(vectors_XD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes int8 [X, D] and scales float32 [X, 1] of float32 [X, D]."""
    scale_X1 = np.abs(vectors_XD).max(axis=1, keepdims=True) / np.float32(LEVELS)
    scale_X1[scale_X1 == 0] = 1  # a vector of zeros
    return np.rint(vectors_XD / scale_X1).astype(np.int8), scale_X1


def write_int8(vectors_XD: MappedArray, folder: pathlib.Path) -> None:
    """Writes codes and scales of the float32 vectors of an index folder, shard by shard."""
    count, width = vectors_XD.shape
    shapes = {CODES: ((count, width), "int8"), SCALES: ((count, 1), "float32")}
    for name in shapes:
        forget_progress(folder / name)  # of other vectors
    writers = [
        ShardWriter(folder / name, create(folder / name, *facts, ""))
        for name, facts in shapes.items()
    ]
    for number, shard in enumerate(shards(count)):
        for writer, rows in zip(writers, quantize(vectors_XD[shard]), strict=True):
            writer.write(number, rows)
    for writer in writers:
        writer.finish()
        forget_progress(writer.folder)


class Int8Searcher:
    """Search over codes on the devices; candidates are scored again if there are vectors."""

    def __init__(
        self, codes_XD: Any, scale_X1: Any, read: Callable[[np.ndarray], np.ndarray] | None = None
    ):
        """Opens a searcher of codes (int8) and scales (float32 [X, 1]), arrays or `MappedArray`.

        `read` returns the vectors [C, D] of passages, given their indices int32 [C]; None: the
        scores of codes are final.
        """
        self._codes, self._read = ExactSearcher(codes_XD, scale_X1), read
        self._count = codes_XD.shape[0]

    @classmethod
    def open(cls, folder: pathlib.Path) -> Int8Searcher:
        """Opens the searcher of an index folder, whose vectors may have been deleted."""
        vectors = folder / "vectors"
        read = MappedArray(vectors).take if vectors.exists() else None
        return cls(MappedArray(folder / CODES), MappedArray(folder / SCALES), read)

    def search(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (scores_QK float32, index_QK int32) for float32 [Q, D]; Q >= 1, 1 <= k <= X."""
        read = self._read
        if read is None:
            return self._codes.search(queries_QD, k)
        depth = CANDIDATES * bucket(k, NEIGHBORS, max(k, self._count))
        _, index_QC = self._codes.search(queries_QD, min(depth, self._count))
        # One query at a time: vectors of all candidates of a batch might not fit into memory.
        pairs = zip(queries_QD, index_QC, strict=True)
        scores_QC = np.stack([_scores(query_D, read(index_C)) for query_D, index_C in pairs])
        scores_QC, index_QC = by_score(scores_QC, index_QC)
        return scores_QC[:, :k], index_QC[:, :k]


def _scores(query_D: np.ndarray, rows_CD: np.ndarray) -> np.ndarray:
    grid = np.float32(GRID)
    scores_C: np.ndarray = np.round(rows_CD.astype(np.float32, copy=False) @ query_D * grid) / grid
    return scores_C
