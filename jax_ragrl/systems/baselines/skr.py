"""SKR-KNN: similar training questions decide whether to retrieve.

Wang et al. 2023, "Self-Knowledge Guided Retrieval Augmentation for Large Language Models".
Departure from the paper: the encoder of the retriever embeds the questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_ragrl.retrieval.embed import Encoder
from jax_ragrl.rollout.system import Steps
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.types import Question


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbors:
    """Labeled training questions (float32 unit vectors, bool), of which the `k` nearest vote."""

    encoder: Encoder
    vectors_XD: np.ndarray
    helps_X: np.ndarray
    k: int = 10

    def helps(self, question: str) -> bool:
        """Returns whether retrieval helped at least half of the nearest; True without any."""
        if not len(self.helps_X):
            return True
        similarity_X = self.vectors_XD @ unit(self.encoder.encode_queries([question]))[0]
        nearest = np.argsort(-similarity_X, kind="stable")[: self.k]
        return bool(self.helps_X[nearest].mean() >= 0.5)


def unit(vectors_XD: np.ndarray) -> np.ndarray:
    """Scales rows to length one, so that inner products are cosines; zero rows stay zero."""
    norms_X1 = np.linalg.norm(vectors_XD, axis=1, keepdims=True)
    return vectors_XD / np.maximum(norms_X1, 1e-12)


def fit_neighbors(
    encoder: Encoder,
    questions: Sequence[Question],
    alone_X: np.ndarray,
    retrieved_X: np.ndarray,
    k: int = 10,
) -> Neighbors:
    """Labels training questions: retrieval helped if its score is higher than without it.

    Questions with equal scores, or with a failed environment (nan), are left out. `alone_X` and
    `retrieved_X` are the scores of direct answering and of Standard RAG on X questions.
    """
    # Not `!=`: nan is unequal to everything, but neither greater nor less.
    informative = np.flatnonzero((alone_X > retrieved_X) | (alone_X < retrieved_X))
    texts = [questions[i].text for i in informative.tolist()]
    vectors = encoder.encode_queries(texts) if texts else np.zeros((0, encoder.dimension))
    vectors_XD = unit(np.asarray(vectors, np.float32))
    return Neighbors(encoder, vectors_XD, (retrieved_X > alone_X)[informative], k)


@dataclasses.dataclass(frozen=True)
class SKR(StandardRAG):
    """Standard RAG if retrieval helped on similar questions, otherwise direct answering."""

    neighbors: Neighbors | None = None

    def steps(self, question: Question) -> Steps:
        """Yields the steps of Standard RAG, or of direct answering if it does not search."""
        searches = self.neighbors is None or self.neighbors.helps(question.text)
        return super().steps(question) if searches else direct(self.style).steps(question)
