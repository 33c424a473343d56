"""Evaluation: every question is answered once, greedily, with answer metrics and costs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.llm.judge import grade_answers
from jax_ragrl.rollout.collect import ActionRequest, Environment, collect
from jax_ragrl.rollout.costs import FREE, Prices, costs_of, role_costs
from jax_ragrl.rollout.data_parallel import merge_shards, own_shard
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.rewards import finite_number
from jax_ragrl.rollout.roles import TOO_LONG
from jax_ragrl.rollout.searches import search_turns, seen_passages, trajectory_measures
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.trace import failure_of, transcript_steps
from jax_ragrl.rollout.tree import Action, Forest, Record, build_forest
from jax_ragrl.runtime.multihost import all_gather_object, on_process_zero
from jax_ragrl.runtime.progress import progress
from jax_ragrl.text.metrics import METRICS, bootstrap_interval
from jax_ragrl.types import Passage, Question

_count = collections.Counter[str]


class Trace(NamedTuple):
    """The course of one rollout of an evaluation.

    `faults` are the errors of invalid actions, and of invalid replies of frozen roles; `steps` are
    the `transcript_steps`. If the environment failed, `finish_reason` is `failed`.
    """

    finish_reason: str
    strategy: str | None
    faults: tuple[str, ...]
    steps: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Result:
    """Scores and counts of a system. A failed question is one whose environment failed.

    Fields:
      scores: float64 `[Q]` by metric, in the order of the questions; nan for failed questions.
      finish_reasons: the number of rollouts by finish reason (`answered`, `failed`, ...).
      invalid_actions: counts by error of invalid actions, and of invalid replies of frozen roles.
      strategies: rollouts by strategy; empty if the system has no strategies.
      costs: float64 `[Q]` by kind of cost, see `costs_of`.
      roles: the result of `role_costs`.
      failures: the error messages of failed questions.
      retrieval: see `retrieval_scores`.
      passages: see `seen_passages`; empty for failed questions.
    """

    scores: Mapping[str, np.ndarray]
    finish_reasons: Mapping[str, int]
    invalid_actions: Mapping[str, int]
    strategies: Mapping[str, int]
    costs: Mapping[str, np.ndarray]
    roles: Mapping[str, Mapping[str, Mapping[str, float]]]
    answers: tuple[str | None, ...]
    failures: tuple[str, ...] = ()
    retrieval: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    passages: tuple[tuple[Passage, ...], ...] = ()
    traces: tuple[Trace, ...] = ()

    def mean(self, metric: str) -> float:
        """Returns the mean of a metric over the questions that did not fail; nan without any."""
        return _mean(self.scores[metric])

    def standard_error(self, metric: str) -> float:
        """Returns the standard error of `mean` over questions; nan without two scores."""
        scores = self.scores[metric][~np.isnan(self.scores[metric])]
        return float(scores.std(ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else np.nan

    def check_answered(self) -> None:
        """Raises `UserError` if every question failed, so that there is no score."""
        if self.finish_reasons and set(self.finish_reasons) == {"failed"}:
            message, count = collections.Counter(self.failures).most_common(1)[0]
            raise UserError(
                f"all of {len(self.answers)} held-out questions failed, {count} times with: "
                f"{message}. Fix the cause and run the same command again: completed work is kept"
            )

    def summary(self) -> dict[str, Any]:
        """Returns an overview as JSON values: scores in percent, None if every question failed.

        `failed_with` is the most frequent error message, if a question failed. `unjudged` counts
        other questions without a verdict of the judge; they do not enter the mean of `judge`.
        """
        most_common = collections.Counter(self.failures).most_common(1)
        unscored = int(np.isnan(self.scores["judge"]).sum()) if "judge" in self.scores else 0
        unjudged = max(0, unscored - self.finish_reasons.get("failed", 0))
        retrieval = {name: _finite(round(100 * _mean(x), 2)) for name, x in self.retrieval.items()}
        return {
            **{name: _finite(round(100 * self.mean(name), 2)) for name in self.scores},
            "ended": dict(self.finish_reasons),
            "malformed": dict(self.invalid_actions),
            "strategies": dict(self.strategies),
            "costs": {
                name: _finite(round(_mean(x), 6 if name == "dollars" else 3))
                for name, x in self.costs.items()
            },
            "roles": dict(self.roles),
            **({"retrieval": retrieval} if retrieval else {}),
            **({"unjudged": unjudged} if unjudged else {}),
            **({"failed_with": most_common[0][0]} if most_common else {}),
        }


def _mean(x_Q: np.ndarray) -> float:
    finite = x_Q[np.isfinite(x_Q)]
    return float(finite.mean()) if finite.size else float("nan")


def _finite(x: float) -> float | None:
    return x if np.isfinite(x) else None


class NoSampler:
    """The sampler of systems without trained roles."""

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        assert not requests, "this system has no trained role"
        return []


def evaluate(
    system: System,
    questions: Sequence[Question],
    environment: Environment,
    *,
    judge: FrozenLLM | None = None,
    prices: Prices = FREE,
    batch: int = 512,
) -> Result:
    """Runs the inference algorithm of a system on every question; each has one result.

    A `judge` grades the answers, as the score `judge`, and `prices` add the cost `dollars`. Results
    do not depend on `batch`, the number of questions that are rolled out together.
    """
    forests = _roll_out(system, questions, environment, batch)
    leaves = [leaf for forest in forests for leaf in forest.leaves()]
    answers = tuple(leaf.answer if leaf else None for leaf in leaves)
    scores = {name: _scores(metric, questions, leaves) for name, metric in METRICS.items()}
    if judge is not None:
        # A failed question is neither right nor wrong, also for the judge.
        has_failed = np.array([leaf is None for leaf in leaves])
        # One judge: hosts with other grades of a server would disagree about the best policies,
        # and each would pay for them.
        grades = on_process_zero(lambda: grade_answers(judge, questions, answers))
        scores["judge"] = np.where(has_failed, np.nan, grades)
    records = [record for forest in forests for record in forest.records]
    costs = [cost for forest in forests for cost in costs_of(forest, prices)]
    return Result(
        scores=scores,
        finish_reasons=_count(leaf.finish_reason if leaf else "failed" for leaf in leaves),
        invalid_actions=_count(error for record in records for error in _errors(record)),
        strategies=_count(strategy for leaf in leaves for strategy in _strategy(leaf)),
        costs={x: np.array([cost[x] for cost in costs]) for x in (costs[0] if costs else ())},
        roles=role_costs(forests),
        answers=answers,
        failures=tuple(message for forest in forests for message in forest.failures),
        retrieval=retrieval_scores(questions, leaves),
        passages=tuple(seen_passages(leaf) if leaf else () for leaf in leaves),
        traces=tuple(trace for forest in forests for trace in _traces(forest)),
    )


def _roll_out(
    system: System, questions: Sequence[Question], environment: Environment, batch: int
) -> list[Forest]:
    def roll_out(chunk: Sequence[Question]) -> Forest:
        own, copies = own_shard(chunk)
        forests = all_gather_object(
            lambda: collect(system, single_chain, own, environment, copies=copies)
        )
        forest = merge_shards(chunk, forests)
        failures = dict(zip(forest.failed_questions, forest.failures, strict=True))
        # A question that a policy on a server did not answer has failed, too; a prompt that is too
        # long is the fault of the system.
        lost = {
            record.question: record.action.error
            for record in forest.records
            if record.action is not None and record.action.error not in ("", TOO_LONG)
        }
        return build_forest(forest.questions, forest.records, lost | failures)

    # Chunks bound the memory of the trees and the number of requests at once.
    chunks = [questions[i : i + batch] for i in range(0, len(questions), batch)]
    with progress("answer", "question", len(questions)):  # `collect` counts them
        return [roll_out(chunk) for chunk in chunks]


def _traces(forest: Forest) -> Iterator[Trace]:
    for number, leaf in enumerate(forest.leaves()):
        if leaf is None:
            yield Trace("failed", None, (failure_of(forest, number),), ())
            continue
        records = [forest.records[node] for node in forest.nodes_of(number)]
        faults = tuple(error for record in records for error in _errors(record))
        strategy = next(iter(_strategy(leaf)), None)
        yield Trace(leaf.finish_reason, strategy, faults, transcript_steps(forest, number))


def retrieval_scores(
    questions: Sequence[Question], leaves: Sequence[Record | None]
) -> dict[str, np.ndarray]:
    """Returns `trajectory_measures` of each question as float64 `[Q]` by name.

    Questions without gold, without an entry of that name, and failed ones are nan.
    """
    turns = max((len(search_turns(leaf)) for leaf in leaves if leaf), default=0)
    rows = [
        trajectory_measures(question, leaf, turns) if question.gold and leaf else {}
        for question, leaf in zip(questions, leaves, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}


def intervals(result: Result) -> dict[str, list[float]]:
    """Returns the 95 % bootstrap interval of every mean score, `[low, high]` in percent."""
    finite = {name: x[np.isfinite(x)] for name, x in result.scores.items()}
    return {
        name: [round(100 * limit, 2) for limit in bootstrap_interval(x)[1:]]
        for name, x in finite.items()
        if len(x)
    }


def table(
    result: Result, questions: Sequence[Question], key: Callable[[Question], Any]
) -> dict[str, dict[str, Any]]:
    """Splits the scores by a property of the questions, such as the number of hops.

    Returns by the property as text: the number of `questions`, and for each metric, and the
    `recall` of gold passages, `[mean, low, high]` with the 95 % bootstrap interval, in percent.
    """
    rows: dict[str, dict[str, Any]] = {}
    columns = {**result.scores, **{n: x for n, x in result.retrieval.items() if n == "recall"}}
    for value in sorted({str(key(q)) for q in questions}):
        in_row = np.array([str(key(q)) == value for q in questions])
        scores = {name: x[in_row & np.isfinite(x)] for name, x in columns.items()}
        rows[value] = {"questions": int(in_row.sum())} | {
            name: [round(100 * v, 2) for v in bootstrap_interval(x)]
            for name, x in scores.items()
            if len(x)
        }
    return rows


def _errors(record: Record) -> tuple[str, ...]:
    # Only leaves count `faults`: the states on the path repeat them.
    if record.action is None:
        return record.state.faults
    return (record.parse_error,) if record.parse_error else ()


def _strategy(leaf: Record | None) -> list[str]:
    """The strategy of a rollout (`none` before the choice), if the system has strategies."""
    strategy = leaf.state.strategy if leaf is not None else None
    return [] if strategy is None else [strategy or "none"]


def _scores(
    metric: Callable[[str, Sequence[str]], float],
    questions: Sequence[Question],
    leaves: Sequence[Record | None],
) -> np.ndarray:
    def score(question: Question, leaf: Record | None) -> float:
        if leaf is None:
            return float("nan")
        # No answer is wrong; a failed environment is not the fault of the system.
        if leaf.answer is None:
            return 0.0
        return finite_number(metric(leaf.answer, question.answers), metric, question)

    return np.array([score(q, a) for q, a in zip(questions, leaves, strict=True)], np.float64)
