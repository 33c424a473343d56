"""Reranking: a slower model orders the first hits of any retriever again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.errors import EffectError
from jax_ragrl.retrieval.base import Retriever, check_depth
from jax_ragrl.runtime.dispatch import is_on_device
from jax_ragrl.types import Hits, Passage

if TYPE_CHECKING:
    from jax_ragrl.models.cross_encoder import CrossEncoder

Pair = tuple[str, Sequence[Passage]]  # a query and the passages to order


class Reranker(Protocol):
    """Scores the passages of queries; higher is better.

    A reranker that computes on the devices of the run, in programs over a mesh, has the attribute
    `on_device = True`: searches then run in the thread of the sampler, see `llm.base.FrozenLLM`.
    """

    def scores_of(self, pairs: Sequence[Pair]) -> Sequence[np.ndarray | EffectError]:
        """Returns the scores of each pair's passages, float32 [K], or the error of its query."""
        ...


@dataclasses.dataclass(frozen=True)
class PairReranker:
    """Scores each passage on its own, with a model that reads a query and a text together."""

    model: CrossEncoder

    def scores_of(self, pairs: Sequence[Pair]) -> list[np.ndarray | EffectError]:
        """Returns float32 [K] per pair; the passages of all pairs are one batch."""
        flat = [(query, passage_text(p)) for query, passages in pairs for p in passages]
        if not flat:
            return [np.zeros(0, np.float32) for _ in pairs]
        ends = np.cumsum([len(passages) for _, passages in pairs])
        return [*np.split(self.model.scores(flat), ends[:-1])]


def load_cross_encoder(name: str) -> PairReranker:
    """Loads a cross-encoder by its name or folder as a reranker."""
    # Imported here: only a run that reranks needs the model.
    from jax_ragrl.models.cross_encoder import load_cross_encoder as load

    return PairReranker(load(name))


@dataclasses.dataclass(frozen=True)
class RerankedRetriever:
    """Orders the first `candidates` hits of a retriever by the scores of a reranker; ties stay.

    It reads the same candidates whatever the depth of a search, so that the order does not depend
    on the depth. Deeper hits follow, each with a score of 1 less than the hit before it.
    """

    retriever: Retriever
    reranker: Reranker
    candidates: int = 100

    @property
    def fingerprint(self) -> str:
        return self.retriever.fingerprint

    @property
    def on_device(self) -> bool:
        """Whether a search must run in the thread of the sampler, see `Reranker`."""
        return any(map(is_on_device, (self.retriever, self.reranker)))

    def search(self, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
        """Returns up to `k` passages per query, best first; a query may fail in either stage."""
        check_depth(k)
        results = self.retriever.search(queries, max(k, self.candidates))
        pairs = zip(queries, results, strict=True)
        candidates = [(q, h.passages[: self.candidates]) for q, h in pairs if isinstance(h, Hits)]
        order = iter(self.reranker.scores_of(candidates))
        return [
            self._reranked(hits, next(order), k) if isinstance(hits, Hits) else hits
            for hits in results
        ]

    def _reranked(self, hits: Hits, order: np.ndarray | EffectError, k: int) -> Hits | EffectError:
        if isinstance(order, EffectError):
            return order
        best = np.argsort(-order, kind="stable").tolist()
        lowest = float(order[best[-1]]) if best else 0.0
        deeper = range(len(best), len(hits.passages))
        passages = [hits.passages[n] for n in (*best, *deeper)]
        new_scores = [*order[best].tolist(), *(lowest - n - 1 for n in range(len(deeper)))]
        return Hits(tuple(passages[:k]), tuple(new_scores[:k]))
