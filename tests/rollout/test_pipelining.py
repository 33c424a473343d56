"""Cohorts give the forest of one batch, and one is sampled for while another is answered."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.pipelining import in_cohorts
from jax_ragrl.rollout.tree import Forest, plant
from jax_ragrl.run.config import Run
from jax_ragrl.types import LLMRequest, Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, system
from tests.rollout.test_data_parallel import BATCH, assert_equal, reply

TREE = dataclasses.replace(PAPER, free=1)


def rolled(questions: Sequence[Question], environment: Environment) -> Forest:
    return collect(system(), TREE, questions, environment, seed=7)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_cohorts_are_the_forest_of_the_whole_batch_node_for_node(count: int):
    tape = Tape(improvise, told=dict.fromkeys(("answer_direct", "answer", "roadmap"), reply))
    whole = rolled(BATCH, tape.environment())
    assert len(whole.records) > 60 and whole.failed
    assert_equal(in_cohorts(BATCH, tape.environment(), count, rolled), whole)
    assert_equal(in_cohorts((), tape.environment(), count, rolled), rolled((), tape.environment()))


class Waiting(Tape):
    """A language model that answers only once another cohort is sampled for."""

    sampled, inside, most = 0, 0, 0
    again = threading.Condition()

    def sample(self, requests: Sequence[Any]) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        actions = super().sample(requests)
        self.inside -= 1
        with self.again:
            self.sampled += bool(requests)  # a round in which nobody acts samples nothing
            self.again.notify_all()
        return actions

    def complete(self, requests: Sequence[LLMRequest]) -> list[Any]:
        with self.again:
            met = self.again.wait_for(lambda: self.sampled >= 2, timeout=20)
        return ["Ulm" if met else "alone"] * len(requests)


def test_one_cohort_is_sampled_for_while_another_waits():
    tape = Waiting({"router": ["[No Retrieval]"] * 2})

    def chains(questions: Sequence[Question], environment: Environment) -> Forest:
        return collect(system(), once, questions, environment)

    forest = in_cohorts((ANN, BOB), tape.environment(), 2, chains)
    assert [r.answer for r in forest.records if r.role == "leaf"] == ["Ulm", "Ulm"]
    assert tape.most == 1


class Crowd:
    """All parts of an environment: each call stays until a second one comes, or for some time."""

    name = fingerprint = "crowd"

    def __init__(self, on_device: bool, seconds: float) -> None:
        self.on_device, self.seconds, self.inside, self.most = on_device, seconds, 0, 0
        self.came = threading.Condition()

    def enter(self, *_: Any) -> None:
        with self.came:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.came.notify_all()
            self.came.wait_for(lambda: self.most > 1, self.seconds)
            self.inside -= 1

    sample = search = complete = enter


@pytest.mark.parametrize(
    ("one", "other", "on_device", "most"),
    [
        ("sampler.sample", "sampler.sample", True, 1),
        ("sampler.sample", "llm.complete", True, 1),
        ("sampler.sample", "judge.complete", True, 1),
        ("retriever.search", "retriever.search", True, 1),
        ("retriever.search", "sampler.sample", True, 2),
        ("llm.complete", "sampler.sample", False, 2),
        ("judge.complete", "llm.complete", False, 2),
    ],
)
def test_cohorts_take_turns_at_the_devices_and_at_the_search_and_at_nothing_else(
    one: str, other: str, on_device: bool, most: int
):
    crowd = Crowd(on_device, 0.2 if most == 1 else 20)

    def ask(questions: Sequence[Question], environment: Environment) -> Forest:
        part, call = (one if questions == [ANN] else other).split(".")
        shared = getattr(environment, part)
        assert (shared.name, shared.on_device) == ("crowd", on_device)
        getattr(shared, call)([])
        return plant(questions, [], {})

    environment = Environment(crowd, crowd, crowd, judge=crowd)
    in_cohorts((ANN, BOB), environment, 2, ask)
    assert crowd.most == most


def test_what_breaks_in_a_cohort_breaks_the_batch():
    tape = Tape({"router": ["[No Retrieval]"] * 2}, told={"answer_direct": lambda request: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        in_cohorts((ANN, BOB), tape.environment(), 2, rolled)


def test_no_cohort_is_no_batch():
    with pytest.raises(UserError, match="cohorts is 0"):
        Run(1, cohorts=0)
