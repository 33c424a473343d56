"""A dense retriever: an encoder and a nearest-neighbor searcher over a corpus."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.retrieval.base import check_depth
from jax_ragrl.retrieval.embed import Encoder
from jax_ragrl.types import Hits


class Searcher(Protocol):
    """Nearest passages by inner product."""

    def search(self, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (scores_QK, index_QK), best first; a score of -inf marks a missing hit."""
        ...


@dataclasses.dataclass(frozen=True)
class DenseRetriever:
    """Searches with an encoder and a searcher; `build` is the SHA-256 of a trained one or empty."""

    corpus: Corpus
    encoder: Encoder
    searcher: Searcher
    build: str = ""

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Returns the `k` >= 1 best passages per query, best first; ties by their position."""
        check_depth(k)
        if not queries:
            return []
        vectors_QD = self.encoder.encode_queries(queries)
        scores_QK, index_QK = self.searcher.search(vectors_QD, min(k, len(self.corpus)))
        result = []
        for scores_K, index_K in zip(scores_QK, index_QK, strict=True):
            # Searchers return arrays of equal width; -inf fills the place of missing hits.
            present_K = np.isfinite(scores_K)
            passages = tuple(self.corpus.passages[n] for n in index_K[present_K].tolist())
            result.append(Hits(passages, tuple(scores_K[present_K].tolist())))
        return result
