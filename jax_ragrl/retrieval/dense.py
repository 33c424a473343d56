"""A retriever made of an encoder and a searcher over a corpus."""

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
        """(scores_QK, index_QK), best first; -inf marks a hit that was not found."""
        ...


@dataclasses.dataclass(frozen=True)
class DenseRetriever:
    """Searches a corpus. What a query finds does not depend on what it is asked together with, but
    for the last bits of an encoder's arithmetic."""

    corpus: Corpus
    encoder: Encoder
    searcher: Searcher

    @property
    def fingerprint(self) -> str:
        """The corpus's."""
        return self.corpus.fingerprint

    def _hits(self, scores_K: np.ndarray, index_K: np.ndarray) -> Hits:
        found = np.isfinite(scores_K)
        passages = tuple(self.corpus.passages[n] for n in index_K[found].tolist())
        return Hits(passages, tuple(scores_K[found].tolist()))

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The `k` best passages of each query, best first; of equal scores the earlier passage.

        Raises:
          UserError: k is below 1.
        """
        check_depth(k)
        if not queries:
            return []
        vectors_QD = self.encoder.encode_queries(queries)
        scores_QK, index_QK = self.searcher.search(vectors_QD, min(k, len(self.corpus)))
        return [self._hits(s, i) for s, i in zip(scores_QK, index_QK, strict=True)]
