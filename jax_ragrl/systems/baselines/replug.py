"""REPLUG: an answer from each passage alone, the answers mixed by how well the passages match.

Shi et al. 2024, "REPLUG: Retrieval-Augmented Black-Box Language Models".

Departure from the paper: it mixes the probabilities of every next token, which the interface of a
frozen language model does not tell. Here a passage votes with its whole weight for the one answer
that is written, greedily, from it; answers that differ in case, articles or punctuation alone are
one answer.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.systems.baselines.scripted import Scripted, Steps, all_of, ask, finish
from jax_ragrl.text.metrics import normalise
from jax_ragrl.text.prompts import numbered
from jax_ragrl.types import Question


def passage_weights(scores: Sequence[float], temperature: float = 1.0) -> np.ndarray:
    """How much each passage counts, float64 `[K]`, summing to 1.

      lambda(d, x) = exp(s(d, x) / t) / sum_d' exp(s(d', x) / t)

    Shi et al. 2024, section 3.2, where t is 1.
    """
    score_K = np.asarray(scores, np.float64) / temperature
    raised_K = np.exp(score_K - score_K.max())
    return raised_K / raised_K.sum()


def mixed(answers: Sequence[str], weights: Sequence[float]) -> str:
    """The answer with the most weight, as it was first written; of equal ones the earlier.

    argmax_y sum_d lambda(d, x) [y = y_d]
    """
    total: dict[str, float] = collections.defaultdict(float)
    for answer, weight in zip(answers, weights, strict=True):
        total[normalise(answer)] += float(weight)
    best = max(total, key=total.__getitem__)
    return next(answer for answer in answers if normalise(answer) == best)


@dataclasses.dataclass(frozen=True)
class Replug(Scripted):
    """Answers from each of `top_k` passages alone, all at once; returns what weighs most."""

    temperature: float = 1.0

    def steps(self, question: Question) -> Steps:
        """Search, an answer a passage, the mixture."""
        hits = yield Search(question.text, self.top_k)
        if not hits.passages:
            yield from finish(self.style, question, ())
        shown = [numbered(self.style, [p]) for p in hits.passages]
        answers = yield from all_of(
            [ask(self.style, "answer", question=question.text, documents=s) for s in shown]
        )
        weights = passage_weights(hits.scores, self.temperature)
        yield Done(mixed(answers, weights.tolist()), "answered")
