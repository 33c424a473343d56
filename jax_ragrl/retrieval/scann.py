"""Approximate inner-product search on the host with ScaNN (Guo et al. 2020).

Below `BRUTE_FORCE` passages every passage is scored. Above, a tree of about sqrt(X) leaves and
asymmetric hashing select candidates, which are then scored exactly. A tenth of the leaves is
searched, within limits, unless `retrieval.tune` chose a setting for a recall.
"""

from __future__ import annotations

import hashlib
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.exact import GRID, bucket, by_score
from jax_ragrl.retrieval.shards import read_array

BRUTE_FORCE = 20_000
NEIGHBORS = 64  # minimum depth of a search, so that the pages of a query agree
# Recall depends on the number of leaves, not on their share. With these numbers `docs/lab/search.py
# --kind scann` measures a recall of 0.994 of the ten nearest among 100,000 vectors of 384 or 768
# dimensions, and with 64 leaves 0.979 among 400,000 of 768 (with half of the candidates: 0.960).
FEWEST_LEAVES, MOST_LEAVES = 64, 128
CANDIDATES = 8  # candidates scored exactly, per requested neighbor
BLOCK = 2  # dimensions per code; with 3, at 768 dimensions, a fifth of the nearest is missed


class Setting(NamedTuple):
    """How thorough a search is."""

    leaves: int  # of the tree, that are searched per query
    candidates: int = CANDIDATES  # passages scored exactly, per requested neighbor


def _pybind() -> Any:
    try:
        from scann.scann_ops.py import scann_ops_pybind
    except ImportError as error:
        raise UserError(
            f"ScaNN cannot be imported ({error}): use the index kind 'exact', or install scann"
        ) from error
    return scann_ops_pybind


def count_leaves(count: int) -> int:
    """Returns the number of leaves of the tree over `count` passages, after ScaNN's guide."""
    return round(math.sqrt(count))


def _tree_with_hashing(vectors_XD: np.ndarray) -> Any:
    count, leaves = len(vectors_XD), count_leaves(len(vectors_XD))
    tree = (
        _pybind()
        .builder(vectors_XD, NEIGHBORS, "dot_product")
        .tree(
            num_leaves=leaves,
            num_leaves_to_search=min(leaves, max(FEWEST_LEAVES, leaves // 10), MOST_LEAVES),
            # ScaNN draws random centers without a seed, but centers of k-means++ with a fixed seed:
            # equal vectors then give equal files, with any number of threads.
            random_init=False,
            # A sample is enough to place the leaves, and it bounds the training time of large
            # corpora.
            training_sample_size=min(count, 250_000),
        )
    )
    # The anisotropic loss, which favors errors orthogonal to a vector (Guo et al. 2020).
    scorer = tree.score_ah(BLOCK, anisotropic_quantization_threshold=0.2)
    return scorer.reorder(NEIGHBORS * CANDIDATES).build()


def build_scann(vectors_XD: np.ndarray, folder: pathlib.Path) -> None:
    """Trains a searcher and writes it (brute force: nothing); `UserError` without ScaNN."""
    _pybind()  # fail now if ScaNN is missing: the index could not be opened later
    if len(vectors_XD) < BRUTE_FORCE:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _tree_with_hashing(vectors_XD).serialize(str(folder), relative_path=True)


def hash_files(folder: pathlib.Path) -> str:
    """Returns the SHA-256 of the names and contents of ScaNN's files; empty without a folder."""
    if not folder.is_dir():
        return ""
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            total.update(
                f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}".encode()
            )
    return total.hexdigest()


class ScannSearcher:
    """A ScaNN searcher with the interface of `ExactSearcher`."""

    def __init__(self, searcher: Any, count: int, setting: Setting | None = None):
        self._searcher, self._count, self._setting = searcher, count, setting

    def at(self, setting: Setting) -> ScannSearcher:
        """Returns this searcher with another setting."""
        return ScannSearcher(self._searcher, self._count, setting)

    @classmethod
    def from_vectors(cls, vectors_XD: np.ndarray) -> ScannSearcher:
        """Builds a searcher over float32 [X, D] in memory."""
        count, vectors_XD = len(vectors_XD), np.ascontiguousarray(vectors_XD, np.float32)
        if count >= BRUTE_FORCE:
            return cls(_tree_with_hashing(vectors_XD), count)
        builder = _pybind().builder(vectors_XD, NEIGHBORS, "dot_product")
        return cls(builder.score_brute_force().build(), count)

    @classmethod
    def open(
        cls, folder: pathlib.Path, vectors: pathlib.Path, count: int, setting: Setting | None = None
    ) -> ScannSearcher:
        """Opens the searcher that `build_scann` wrote; brute force reads the folder of vectors.

        Without a setting it searches as it was built.

        Raises:
          UserError: ScaNN is not installed, or the files are missing.
        """
        if count < BRUTE_FORCE:
            return cls.from_vectors(read_array(vectors))
        pybind = _pybind()
        if not (folder / "scann_assets.pbtxt").is_file():
            raise UserError(f"{folder} holds no ScaNN searcher: rerun 'ragrl data index'")
        return cls(pybind.load_searcher(str(folder)), count, setting)

    def search(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (scores_QK float32, index_QK int32) for float32 [Q, D]; Q >= 1, 1 <= k <= X.

        A score of -inf marks a missing hit.
        """
        depth = bucket(k, min(NEIGHBORS, self._count), self._count)
        leaves, candidates = self._setting or (None, CANDIDATES)
        index_QK, scores_QK = self._searcher.search_batched_parallel(
            queries_QD,
            final_num_neighbors=depth,
            pre_reorder_num_neighbors=depth * candidates,
            leaves_to_search=leaves,
        )
        # ScaNN marks missing hits by nan. Equal passages get equal scores on this grid.
        scores_QK = np.where(np.isnan(scores_QK), -np.inf, np.round(scores_QK * GRID) / GRID)
        scores_QK, index_QK = by_score(scores_QK, index_QK)
        return scores_QK[:, :k].astype(np.float32), index_QK[:, :k].astype(np.int32)
