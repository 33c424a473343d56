"""SKR-KNN: similar questions of known outcome decide whether retrieval helps.

Wang et al. 2023, "Self-Knowledge Guided Retrieval Augmentation for Large Language Models".
Departure from the paper: questions are embedded by the retriever's own encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_ragrl.retrieval.embed import Encoder
from jax_ragrl.systems.baselines.standard import StandardRAG, State
from jax_ragrl.types import Question


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours:
    """Labelled questions: float32 unit vectors `[X, D]`, bool `[X]` whether retrieval helped."""

    encoder: Encoder
    vectors_XD: np.ndarray
    helps_X: np.ndarray
    k: int = 10

    def helps(self, question: str) -> bool:
        """Whether retrieval helped at least half of the `k` nearest; yes where none is known."""
        if not len(self.helps_X):
            return True
        similar_X = self.vectors_XD @ unit(self.encoder.encode_queries([question]))[0]
        nearest = np.argsort(-similar_X, kind="stable")[: self.k]
        return bool(self.helps_X[nearest].mean() >= 0.5)


def unit(vectors_XD: np.ndarray) -> np.ndarray:
    """Rows of length one, so that inner products are cosines; zero rows stay."""
    norms_X1 = np.linalg.norm(vectors_XD, axis=1, keepdims=True)
    return vectors_XD / np.maximum(norms_X1, 1e-12)


def neighbours(
    encoder: Encoder,
    questions: Sequence[Question],
    alone_X: np.ndarray,
    retrieved_X: np.ndarray,
    k: int = 10,
) -> Neighbours:
    """What training questions teach: retrieval helped where its score is higher than without.

    Questions that score equally both ways, or whose environment failed (nan), teach nothing.

    Args:
      questions: X training questions.
      alone_X, retrieved_X: the scores of direct answering and of Standard RAG on them.
    """
    kept = np.flatnonzero((alone_X > retrieved_X) | (alone_X < retrieved_X))
    texts = [questions[i].text for i in kept.tolist()]
    vectors = encoder.encode_queries(texts) if texts else np.zeros((0, encoder.dimension))
    vectors_XD = unit(np.asarray(vectors, np.float32))
    return Neighbours(encoder, vectors_XD, (retrieved_X > alone_X)[kept], k)


@dataclasses.dataclass(frozen=True)
class SKR(StandardRAG):
    """Standard RAG where similar questions gained by it, direct answering elsewhere."""

    known: Neighbours | None = None

    def start(self, question: Question) -> State:
        """The state before a search, or, without one, before the answer."""
        searches = self.known is None or self.known.helps(question.text)
        return State(question, None if searches else ())
