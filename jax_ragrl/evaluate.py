"""Evaluation: every question once, greedily, with answer metrics and counted costs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.collect import ActionSampler, Environment, collect
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.text.metrics import cover_match, exact_match, f1
from jax_ragrl.types import Hits, LLMRequest, Question

METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "cover_em": cover_match,
    "em": exact_match,
    "f1": f1,
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Scores of a system, float64 `[Q]` in the order of the questions, and counts.

    `ended` counts why rollouts ended (`answered`, or what was malformed), `strategies` what the
    router chose, `costs` what was called. A question whose environment failed scores nan and is
    counted under `failed`.
    """

    scores: Mapping[str, np.ndarray]
    ended: Mapping[str, int]
    strategies: Mapping[str, int]
    costs: Mapping[str, float]
    answers: tuple[str | None, ...]

    def mean(self, metric: str = "cover_em") -> float:
        """The mean of a metric over the questions that could be evaluated."""
        return float(np.nanmean(self.scores[metric]))

    def summary(self) -> dict[str, Any]:
        """A JSON-able overview, in percent where it is a share."""
        return {
            **{name: round(100 * self.mean(name), 2) for name in self.scores},
            "ended": dict(self.ended),
            "strategies": dict(self.strategies),
            "costs": {k: round(v, 3) for k, v in self.costs.items()},
        }


class NoSampler:
    """The sampler of systems that generate nothing themselves."""

    def sample(self, requests: Sequence[Any]) -> list[Any]:
        """Only ever called with nothing."""
        assert not requests, "this system has no trained role"
        return []


class Meter:
    """Counts what an environment is asked: calls and passages."""

    def __init__(self, retriever: Retriever, llm: FrozenLLM):
        self._retriever, self._llm, self.name = retriever, llm, llm.name
        self.counts = collections.Counter(llm_calls=0, retrieval_calls=0)

    @property
    def fingerprint(self) -> str:
        """That of the corpus."""
        return self._retriever.fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Counted searches."""
        self.counts["retrieval_calls"] += len(queries)
        return self._retriever.search(queries, k)

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Counted calls of the language model."""
        self.counts["llm_calls"] += len(requests)
        return self._llm.complete(requests)


def evaluate(
    system: Any,
    questions: Sequence[Question],
    sampler: ActionSampler,
    retriever: Retriever,
    llm: FrozenLLM,
    batch: int = 512,
) -> Result:
    """Runs a system's inference algorithm over every question; nothing is dropped.

    Args:
      system: a `systems.base.System`, with its roles sampled by `sampler` (greedy for a table).
      batch: questions rolled out together; results do not depend on it.
    """
    meter = Meter(retriever, llm)
    environment = Environment(sampler, meter, meter)
    forests = [
        collect(system, once, questions[i : i + batch], environment)
        for i in range(0, len(questions), batch)
    ]
    answers = [answer for forest in forests for answer in _answers(forest)]
    ended = collections.Counter(why for forest in forests for why in _endings(forest))
    return Result(
        {name: _scores(metric, questions, answers) for name, metric in METRICS.items()},
        ended,
        collections.Counter(s for forest in forests for s in _strategies(forest)),
        {name: count / len(questions) for name, count in sorted(meter.counts.items())},
        tuple(answer if isinstance(answer, str) else None for answer in answers),
    )


_FAILED = object()


def _answers(forest: Forest) -> list[Any]:
    """One answer a question: None where its rollout died, `_FAILED` where its effects did."""
    answers: list[Any] = [None] * len(forest.questions)
    for i in forest.failed:
        answers[i] = _FAILED
    for i in np.flatnonzero(forest.leaf_N).tolist():
        answers[forest.records[i].question] = forest.records[i].answer
    return answers


def _endings(forest: Forest) -> list[str]:
    ends = [forest.records[i].why for i in np.flatnonzero(forest.leaf_N)]
    return ends + ["failed"] * len(forest.failed)


def _strategies(forest: Forest) -> list[str]:
    """What each rollout's strategy was, where the system has strategies."""
    states = [forest.records[i].state for i in np.flatnonzero(forest.leaf_N)]
    return [s.strategy or "none" for s in states if hasattr(s, "strategy")]


def _scores(
    metric: Callable[[str, Sequence[str]], float],
    questions: Sequence[Question],
    answers: Sequence[Any],
) -> np.ndarray:
    def one(question: Question, answer: Any) -> float:
        if answer is _FAILED:
            return float("nan")
        return 0.0 if answer is None else metric(answer, question.answers)

    return np.array([one(q, a) for q, a in zip(questions, answers, strict=True)], np.float64)
