"""Fusion of the hits of several retrievers.

`rrf` (Cormack et al. 2009): a passage of rank r (from 1) in the hits of retriever i gets
w_i / (60 + r). `weighted`: it gets w_i (s - min) / (max - min), with the scores s of the query's
hits in that retriever.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jax_ragrl.errors import EffectError
from jax_ragrl.retrieval.base import Retriever, check_depth
from jax_ragrl.types import Hits, Passage

RRF_K = 60  # of the paper, where other values hardly differ


def scaled_scores(hits: Hits) -> np.ndarray:
    """Returns the scores of the hits scaled to 0 to 1, float64 [K]; equal scores all become 1."""
    scores_K = np.array(hits.scores, np.float64)
    low, high = (scores_K.min(), scores_K.max()) if len(scores_K) else (0.0, 0.0)
    return (scores_K - low) / (high - low) if high > low else np.ones_like(scores_K)


METHODS: Mapping[str, Callable[[Hits], np.ndarray]] = {
    "rrf": lambda hits: 1.0 / (RRF_K + 1.0 + np.arange(len(hits.passages))),
    "weighted": scaled_scores,
}


def fuse(results: Sequence[Hits], weights: Sequence[float], method: str) -> Hits:
    """Merges the hits of one query, best first; ties in the order of retrievers, then of ranks."""
    # The whole passage is the key: servers with another corpus may use the same ids.
    parts: dict[Passage, list[float]] = {}
    for hits, weight in zip(results, weights, strict=True):
        points_K = METHODS[method](hits) * weight
        for passage, points in zip(hits.passages, points_K.tolist(), strict=True):
            parts.setdefault(passage, []).append(points)
    # An exact sum, so that equal contributions tie in any order of the retrievers.
    score = {passage: math.fsum(points) for passage, points in parts.items()}
    best_first = sorted(score.items(), key=lambda item: -item[1])
    return Hits(
        tuple(passage for passage, _ in best_first), tuple(points for _, points in best_first)
    )


@dataclasses.dataclass(frozen=True)
class FusedRetriever:
    """Searches with several retrievers and fuses their hits.

    The first `candidates` hits of each retriever are fused whatever the depth of a search, so that
    the order of the first hits does not depend on it. Hits end with the last of these candidates.
    """

    retrievers: tuple[Retriever, ...]
    weights: tuple[float, ...]
    method: str = "rrf"
    candidates: int = 100

    @property
    def fingerprint(self) -> str:
        return " + ".join(dict.fromkeys(r.fingerprint for r in self.retrievers))

    def search(self, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
        """Returns up to `k` passages per query, best first.

        A query that failed in one retriever fails: the others alone are another environment.
        """
        check_depth(k)
        results = [retriever.search(queries, self.candidates) for retriever in self.retrievers]
        fused: list[Hits | EffectError] = []
        for parts in zip(*results, strict=True):
            if errors := [part for part in parts if isinstance(part, EffectError)]:
                fused.append(errors[0])
                continue
            hits = fuse([p for p in parts if isinstance(p, Hits)], self.weights, self.method)
            fused.append(Hits(hits.passages[:k], hits.scores[:k]))
        return fused
