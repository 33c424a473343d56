"""REPLUG: one answer per passage, combined by how well the passages match the question.

Shi et al. 2024, "REPLUG: Retrieval-Augmented Black-Box Language Models".

Departures from the paper: it averages the probabilities of every next token, which the interface of
a frozen language model does not provide. Here each passage votes with its full weight for the one
greedy answer from it. Answers that differ only in case, articles or punctuation are equal. The
retriever is not tuned: REPLUG LSR, which C-3PO's table calls retriever fine-tuning, is not here.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.rollout.system import Steps, all_of
from jax_ragrl.systems.baselines.script import ScriptedSystem
from jax_ragrl.text.metrics import normalize
from jax_ragrl.types import Question


def passage_weights(scores: Sequence[float], temperature: float = 1.0) -> np.ndarray:
    """Returns the weight of each passage, float64 `[K]`, with sum 1.

      lambda(d, x) = exp(s(d, x) / t) / sum_d' exp(s(d', x) / t)

    Shi et al. 2024, section 3.2, where t is 1.
    """
    score_K = np.asarray(scores, np.float64) / temperature
    raised_K = np.exp(score_K - score_K.max())
    return raised_K / raised_K.sum()


def weighted_vote(answers: Sequence[str], weights: Sequence[float]) -> str:
    """Returns the answer with the largest weight, in its first spelling; of equal ones the first.

    argmax_y sum_d lambda(d, x) [y = y_d]
    """
    total: dict[str, float] = collections.defaultdict(float)
    for answer, weight in zip(answers, weights, strict=True):
        total[normalize(answer)] += float(weight)
    best = max(total, key=total.__getitem__)
    return next(answer for answer in answers if normalize(answer) == best)


@dataclasses.dataclass(frozen=True)
class Replug(ScriptedSystem):
    """Answers from each of `top_k` passages separately and returns the weighted vote."""

    temperature: float = 1.0

    def steps(self, question: Question) -> Steps:
        """Searches, answers from each passage (all requests at once) and takes the vote."""
        hits = yield Search(question.text, self.top_k)
        if not hits.passages:
            yield from self.finish(question, ())
        answers = yield from all_of([self.answer(question, [p]) for p in hits.passages])
        weights = passage_weights(hits.scores, self.temperature)
        yield Done(weighted_vote(answers, weights.tolist()), "answered")
