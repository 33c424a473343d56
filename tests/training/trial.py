"""Runs whose parameters all equal the number of updates that they have taken."""

import itertools
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import pytest

from jax_ragrl.rollout.tree import Forest, build_forest
from jax_ragrl.run.build import build_components
from jax_ragrl.run.checkpoint_name import RunCheckpoint
from jax_ragrl.run.load import load_job
from jax_ragrl.training import loop
from jax_ragrl.training.log import read_metrics
from jax_ragrl.types import Question
from tests.jobs import config_values
from tests.rollout.tape import PAPER, Tape, improvise, play
from tests.tiny import saved_policy
from tests.training.test_best import moved, weights
from tests.training.test_outage import ROLL_OUT


class Trial:
    """A run with recorded rollouts and updates.

    Fields:
      sampled: per rollout, its step, the ids of its questions and the parameters that sampled.
      learned: per update, its step and the forest.
      rates: per update, the transformation of the gradient.
      threads: per step, the name of the thread that rolled out.
      interrupted_at: a step whose update is interrupted once.
      fails_at: steps whose rollouts find no server.
      norms: the norms of the gradient of the steps.
      replies: of a language model that never answers the same.
    """

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.norms = folder, [1.0] * 9
        self.sampled = list[tuple[int, list[str], float]]()
        self.learned = list[tuple[int, Forest]]()
        self.rates, self.threads = list[object](), dict[int, str]()
        self.interrupted_at: int | None = None
        self.fails_at = set[int]()
        self.replies: Iterator[int] = itertools.count()
        self.has_learned = [threading.Event() for _ in range(12)]
        saved_policy(folder)
        monkeypatch.setattr(ROLL_OUT, self.roll_out)
        monkeypatch.setattr(loop, "learn", self.learn)

    def roll_out(self, method, environment, questions: Sequence[Question], step) -> Forest:
        self.threads[step] = threading.current_thread().name
        if self.threads[step].startswith("rollout"):
            # The update of the step before comes first and takes all buffers that it can.
            assert self.has_learned[step - 1].wait(60)
        weight = first(environment.sampler.models["policy"].params)
        self.sampled.append((step, [question.id for question in questions], weight))
        if step in self.fails_at:
            return build_forest(questions, [], dict.fromkeys(range(len(questions)), "no route"))
        replies = dict.fromkeys(("answer_direct", "answer"), f"reply {next(self.replies)}")
        return play(Tape(improvise, replies=replies), *questions, expander=PAPER, seed=step)

    def learn(self, method, policies, forest, turns, step):
        if step == self.interrupted_at:
            self.interrupted_at = None
            self.has_learned[step].set()
            raise KeyboardInterrupt
        self.learned.append((step, forest))
        (own,) = policies.values()
        self.rates.append(own.spec.policy.optimizer)
        trained = jax.tree.leaves(own.state.policy.params)
        after = moved(policies, first(trained) if step else 0)
        for leaf in trained:
            leaf.delete()  # as a program to which they are donated
        self.has_learned[step].set()
        return after, {"grad_norm": self.norms[step]}

    def train(self, staleness: int = 1, guard: dict[str, Any] | None = None, **run: Any) -> None:
        """Trains with settings of `run`, of the guard, and with `phases`."""
        for event in self.has_learned:
            event.clear()
        settings = {"policy": self.folder / "policy", "data.world.size": 40}
        settings |= {"objective.importance_weight_cap": 2.0, "index.kind": "exact"}
        changes = {"steps": 5, "dev_questions": 0, "save_every": 1, "questions_per_step": 2}
        changes |= {"staleness": staleness} | {k: v for k, v in run.items() if k != "phases"}
        settings |= {f"run.{name}": value for name, value in changes.items()}
        values = config_values("tiny/c3po", settings)
        values |= {"guard": guard} if guard else {}
        values |= {"schedule": {"phases": run["phases"]}} if "phases" in run else {}
        self.job = load_job(values)
        self.parts = build_components(self.job, self.folder)
        loop.train(self.job, self.parts, self.folder)

    def rows(self, name: str) -> list[float | None]:
        return [row.get(name) for row in read_metrics(self.folder)]

    def steps_and_weights(self) -> list[tuple[int, float]]:
        return [(step, weight) for step, _, weight in self.sampled]

    def updates(self) -> set[float]:
        return weights(RunCheckpoint(self.folder), self.job, self.parts)


def seeded_rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the logged metrics without durations."""
    hidden, rows = ("time/", "compile/", "tokens_per_sec"), read_metrics(workdir)
    return [{k: v for k, v in row.items() if not k.startswith(hidden)} for row in rows]


def first(params: Any) -> float:
    return float(jax.device_get(jax.tree.leaves(params)[0]).flat[0])


def guard(action: str, **more: Any) -> dict[str, Any]:
    """Returns settings of a guard with an action on norms of the gradient above 10."""
    limit = {"threshold": 10.0, "action": action}
    return {"baseline_steps": 2, "patience": 2, "grad_norm": limit} | more
