"""Evaluation: every question once, greedily, with answer metrics and counted costs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.llm.judge import judged
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.costs import costs_of, role_costs
from jax_ragrl.rollout.data_parallel import in_shares
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.tree import Record
from jax_ragrl.text.metrics import (
    bootstrap_interval,
    cover_match,
    cover_match_tokens,
    exact_match,
    f1,
)
from jax_ragrl.types import Question

# From an answer and the gold ones to a score from 0 to 1. A module of one's own may add another,
# which is then a column of every table.
METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "cover_em": cover_match,
    "cover_em_tokens": cover_match_tokens,
    "em": exact_match,
    "f1": f1,
}
METRIC_NAMES = {"cover_em": "cover-EM", "cover_em_tokens": "cover-EM", "em": "EM", "f1": "F1"}


@dataclasses.dataclass(frozen=True)
class Result:
    """Scores of a system, float64 `[Q]` in the order of the questions, and counts.

    `ended` counts why rollouts ended (`answered`, or what went wrong), `malformed` the malformed
    actions, and the malformed replies of frozen roles that a leaf's state lists as `faults`;
    `strategies` what was chosen where a system has strategies; `costs` are float64 `[Q]`, see
    `costs_of`, and `roles` what `role_costs` gives. A question whose environment failed scores nan
    and is counted as `failed`; `failures` is what was said of each.
    """

    scores: Mapping[str, np.ndarray]
    ended: Mapping[str, int]
    malformed: Mapping[str, int]
    strategies: Mapping[str, int]
    costs: Mapping[str, np.ndarray]
    roles: Mapping[str, Mapping[str, Mapping[str, float]]]
    answers: tuple[str | None, ...]
    failures: tuple[str, ...] = ()

    def mean(self, metric: str) -> float:
        """The mean of a metric over the questions that could be evaluated; nan without any."""
        return _mean(self.scores[metric])

    def check_answered(self) -> None:
        """Raises `UserError` where the environment failed on every question: that is no score."""
        if self.ended and set(self.ended) == {"failed"}:
            told, count = collections.Counter(self.failures).most_common(1)[0]
            raise UserError(
                f"not one of {len(self.answers)} held-out questions could be asked, {count} times "
                f"with: {told}. Start it again once that is well: what is done is kept"
            )

    def summary(self) -> dict[str, Any]:
        """A JSON-able overview, in percent where it is a share; None where nothing could be
        evaluated. `failed_with` is what most failures said, where there are any."""
        told = collections.Counter(self.failures).most_common(1)
        return {
            **{name: _finite(round(100 * self.mean(name), 2)) for name in self.scores},
            "ended": dict(self.ended),
            "malformed": dict(self.malformed),
            "strategies": dict(self.strategies),
            "costs": {name: _finite(round(_mean(x), 3)) for name, x in self.costs.items()},
            "roles": dict(self.roles),
            **({"failed_with": told[0][0]} if told else {}),
        }


def _mean(x_Q: np.ndarray) -> float:
    finite = x_Q[np.isfinite(x_Q)]
    return float(finite.mean()) if finite.size else float("nan")


def _finite(x: float) -> float | None:
    """JSON has no nan."""
    return x if np.isfinite(x) else None


class NoSampler:
    """The sampler of systems that generate nothing themselves."""

    def sample(self, requests: Sequence[Any]) -> list[Any]:
        """Only ever called with nothing."""
        assert not requests, "this system has no trained role"
        return []


def evaluate(
    system: Any,
    questions: Sequence[Question],
    environment: Environment,
    *,
    judge: FrozenLLM | None = None,
    batch: int = 512,
) -> Result:
    """Runs a system's inference algorithm over every question; nothing is dropped.

    Args:
      system: a `systems.base.System`.
      environment: a sampler (greedy for a table), a retriever and a frozen language model.
      judge: a language model that grades answers, as the score `judge`.
      batch: questions rolled out together; results do not depend on it.
    """
    chunks = [questions[i : i + batch] for i in range(0, len(questions), batch)]
    forests = [
        in_shares(chunk, lambda own: collect(system, once, own, environment)) for chunk in chunks
    ]
    leaves = [leaf for forest in forests for leaf in forest.ends()]
    answers = [leaf.answer if leaf else None for leaf in leaves]
    scores = {name: _scores(metric, questions, leaves) for name, metric in METRICS.items()}
    if judge is not None:
        failed = np.array([leaf is None for leaf in leaves])
        scores["judge"] = np.where(failed, np.nan, judged(judge, questions, answers))
    costs = [cost for forest in forests for cost in costs_of(forest)]
    records = [record for forest in forests for record in forest.records]
    return Result(
        scores,
        collections.Counter(leaf.why if leaf else "failed" for leaf in leaves),
        collections.Counter(fault for record in records for fault in _faults(record)),
        collections.Counter(s for leaf in leaves for s in _strategy(leaf)),
        {name: np.array([cost[name] for cost in costs]) for name in costs[0]} if costs else {},
        role_costs(forests),
        tuple(answers),
        tuple(why for forest in forests for why in forest.failures),
    )


def intervals(result: Result) -> dict[str, list[float]]:
    """The 95 % bootstrap interval of every mean score, `[low, high]` in percent.

    Questions whose environment failed are left out; a score of none has no interval.
    """
    finite = {name: x[np.isfinite(x)] for name, x in result.scores.items()}
    return {
        name: [round(100 * bound, 2) for bound in bootstrap_interval(x)[1:]]
        for name, x in finite.items()
        if len(x)
    }


def table(
    result: Result, questions: Sequence[Question], key: Callable[[Question], Any]
) -> dict[str, dict[str, Any]]:
    """Every score by a property of the questions (hops, kind), with its 95 % interval, in percent.

    Questions whose environment failed are left out.
    """
    rows: dict[str, dict[str, Any]] = {}
    for value in sorted({str(key(q)) for q in questions}):
        chosen = np.array([str(key(q)) == value for q in questions])
        scores = {name: x[chosen & np.isfinite(x)] for name, x in result.scores.items()}
        rows[value] = {"questions": int(chosen.sum())} | {
            name: [round(100 * v, 2) for v in bootstrap_interval(x)]
            for name, x in scores.items()
            if len(x)
        }
    return rows


def _faults(record: Record) -> tuple[str, ...]:
    """What was malformed: an action, or, at a leaf, the replies of frozen roles before it."""
    if record.action is None:
        return tuple(getattr(record.state, "faults", ()))
    return (record.fault,) if record.fault else ()


def _strategy(leaf: Record | None) -> list[str]:
    """What a rollout's strategy was, where the system has strategies (None where not)."""
    strategy = getattr(leaf.state, "strategy", None) if leaf is not None else None
    return [] if strategy is None else [strategy or "none"]


def _scores(
    metric: Callable[[str, Sequence[str]], float],
    questions: Sequence[Question],
    leaves: Sequence[Record | None],
) -> np.ndarray:
    def one(question: Question, leaf: Record | None) -> float:
        if leaf is None:
            return float("nan")
        return 0.0 if leaf.answer is None else metric(leaf.answer, question.answers)

    return np.array([one(q, a) for q, a in zip(questions, leaves, strict=True)], np.float64)
