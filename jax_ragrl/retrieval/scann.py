"""Approximate inner-product search on the host with ScaNN (Guo et al. 2020).

Below `BRUTE_FORCE` passages every passage is scored; above, a tree of about sqrt(X) leaves and
asymmetric hashing choose candidates that are then scored exactly. Searched are a tenth of the
leaves, from `FEWEST_LEAVES` up to `MOST_LEAVES`.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.embed import read_vectors
from jax_ragrl.retrieval.exact import GRID, bucket, by_score

BRUTE_FORCE = 20_000
NEIGHBOURS = 64  # searches are rounded up to this: pages of one query then agree
# A recall takes a number of leaves, not a share of them. With these numbers `ragrl bench search
# --kind scann` finds 0.994 of the ten nearest among 100 000 vectors of 384 or 768 dimensions, and
# with 64 leaves 0.979 among 400 000 of 768 (half the candidates: 0.960).
FEWEST_LEAVES, MOST_LEAVES = 64, 128
CANDIDATES = 8  # scored exactly, for each neighbour wanted
BLOCK = 2  # dimensions that share a code; with 3, of 768, a fifth of the nearest is not found


def _pybind() -> Any:
    """ScaNN's numpy interface.

    Raises:
      UserError: ScaNN is not installed.
    """
    try:
        from scann.scann_ops.py import scann_ops_pybind
    except ImportError as error:
        raise UserError(
            f"ScaNN cannot be imported ({error}): use the index kind 'exact', or install scann"
        ) from error
    return scann_ops_pybind


def _brute_force(vectors_XD: np.ndarray) -> Any:
    builder = _pybind().builder(vectors_XD, NEIGHBOURS, "dot_product")
    return builder.score_brute_force().build()


def _hashed(vectors_XD: np.ndarray) -> Any:
    """Tree and asymmetric hashing, with as many leaves as ScaNN's guide recommends."""
    count = len(vectors_XD)
    leaves = round(math.sqrt(count))
    tree = (
        _pybind()
        .builder(vectors_XD, NEIGHBOURS, "dot_product")
        .tree(
            num_leaves=leaves,
            num_leaves_to_search=min(leaves, max(FEWEST_LEAVES, leaves // 10), MOST_LEAVES),
            training_sample_size=min(count, 250_000),
        )
    )
    hashed = tree.score_ah(BLOCK, anisotropic_quantization_threshold=0.2)
    return hashed.reorder(NEIGHBOURS * CANDIDATES).build()


def build_scann(vectors_XD: np.ndarray, folder: pathlib.Path) -> None:
    """Builds what needs training and writes it; brute force needs nothing but the vectors.

    Raises:
      UserError: ScaNN is not installed.
    """
    _pybind()  # asked for even where nothing is built: the index could not be opened
    if len(vectors_XD) < BRUTE_FORCE:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _hashed(vectors_XD).serialize(str(folder), relative_path=True)


class ScannSearcher:
    """A ScaNN searcher behind the interface of `ExactSearcher`."""

    def __init__(self, searcher: Any, count: int):
        """Args: ScaNN's own searcher, the number of vectors in it."""
        self._searcher, self._count = searcher, count

    @classmethod
    def from_vectors(cls, vectors_XD: np.ndarray) -> ScannSearcher:
        """Over float32 [X, D], in memory."""
        build = _brute_force if len(vectors_XD) < BRUTE_FORCE else _hashed
        return cls(build(np.ascontiguousarray(vectors_XD, np.float32)), len(vectors_XD))

    @classmethod
    def open(cls, folder: pathlib.Path, vectors: pathlib.Path, count: int) -> ScannSearcher:
        """What `build_scann` wrote, over the vectors of `embed`.

        Raises:
          UserError: ScaNN is not installed, or the files are missing.
        """
        if count < BRUTE_FORCE:
            return cls.from_vectors(read_vectors(vectors))
        pybind = _pybind()
        if not (folder / "scann_assets.pbtxt").is_file():
            raise UserError(f"{folder} holds no ScaNN searcher: rerun 'ragrl index'")
        return cls(pybind.load_searcher(str(folder)), count)

    def search(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores_QK float32, index_QK int32); a score of -inf marks a hit that was not found.

        Args:
          queries_QD: float32, Q at least 1.
          k: 1 <= k <= X.
        """
        depth = bucket(k, min(NEIGHBOURS, self._count), self._count)
        index_QK, scores_QK = self._searcher.search_batched_parallel(
            queries_QD, final_num_neighbors=depth, pre_reorder_num_neighbors=depth * CANDIDATES
        )
        scores_QK = np.where(np.isnan(scores_QK), -np.inf, np.round(scores_QK * GRID) / GRID)
        scores_QK, index_QK = by_score(scores_QK, index_QK)
        return scores_QK[:, :k].astype(np.float32), index_QK[:, :k].astype(np.int32)
