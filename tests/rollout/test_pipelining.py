"""Pipelined groups give the forest of one batch and overlap sampling with other calls."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.pipelining import pipelined_rollout
from jax_ragrl.rollout.tree import Forest, build_forest
from jax_ragrl.run.config import Run
from jax_ragrl.types import LLMRequest
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, system
from tests.rollout.test_data_parallel import BATCH, assert_equal, reply

TREE = dataclasses.replace(PAPER, free_samples=1)


def roll_out(numbers: Sequence[int], environment: Environment) -> Forest:
    return collect(system(), TREE, [BATCH[i] for i in numbers], environment, seed=7)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_pipelined_groups_equal_the_forest_of_the_whole_batch(count: int):
    tape = Tape(improvise, replies=dict.fromkeys(("answer_direct", "answer", "roadmap"), reply))
    expected = roll_out(range(len(BATCH)), tape.environment())
    assert len(expected.records) > 60 and expected.failed_questions
    assert_equal(pipelined_rollout(BATCH, tape.environment(), count, roll_out), expected)
    assert_equal(
        pipelined_rollout((), tape.environment(), count, roll_out), roll_out((), tape.environment())
    )


class Waiting(Tape):
    """A language model that answers only after another group has been sampled."""

    sampled, inside, most = 0, 0, 0
    again = threading.Condition()

    def sample(self, requests: Sequence[Any]) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        actions = super().sample(requests)
        self.inside -= 1
        with self.again:
            self.sampled += bool(requests)  # a round without actions has no requests
            self.again.notify_all()
        return actions

    def complete(self, requests: Sequence[LLMRequest]) -> list[Any]:
        with self.again:
            met = self.again.wait_for(lambda: self.sampled >= 2, timeout=20)
        return ["Ulm" if met else "alone"] * len(requests)


def test_one_group_is_sampled_while_another_waits():
    tape = Waiting({"router": ["[No Retrieval]"] * 2})

    def chains(numbers: Sequence[int], environment: Environment) -> Forest:
        questions = [(ANN, BOB)[i] for i in numbers]
        return collect(system(), single_chain, questions, environment)

    forest = pipelined_rollout((ANN, BOB), tape.environment(), 2, chains)
    assert [r.answer for r in forest.records if r.role == "leaf"] == ["Ulm", "Ulm"]
    assert tape.most == 1


class Crowd:
    """All components of an environment; a call returns after a second one starts, or times out."""

    name = fingerprint = "crowd"

    def __init__(self, on_device: bool, seconds: float) -> None:
        self.on_device, self.seconds, self.inside, self.most = on_device, seconds, 0, 0
        self.arrival = threading.Condition()

    def enter(self, *_: Any) -> None:
        with self.arrival:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.arrival.notify_all()
            self.arrival.wait_for(lambda: self.most > 1, self.seconds)
            self.inside -= 1

    sample = search = complete = enter


@pytest.mark.parametrize(
    ("one", "other", "on_device", "most"),
    [
        ("sampler.sample", "sampler.sample", True, 1),
        ("sampler.sample", "llm.complete", True, 1),
        ("sampler.sample", "judge.complete", True, 1),
        ("retriever.search", "retriever.search", True, 1),
        ("retriever.search", "sampler.sample", False, 2),
        ("retriever.search", "sampler.sample", True, 1),  # a reranker on the sampler's devices
        ("llm.complete", "sampler.sample", False, 2),
        ("judge.complete", "llm.complete", False, 2),
    ],
)
def test_only_device_and_search_calls_exclude_each_other(
    one: str, other: str, on_device: bool, most: int
):
    crowd = Crowd(on_device, 0.2 if most == 1 else 20)

    def ask(numbers: Sequence[int], environment: Environment) -> Forest:
        part, call = (one if numbers == [0] else other).split(".")
        shared = getattr(environment, part)
        assert (shared.name, shared.on_device) == ("crowd", on_device)
        getattr(shared, call)([])
        return build_forest([(ANN, BOB)[i] for i in numbers], [], {})

    environment = Environment(crowd, crowd, crowd, judge=crowd)
    pipelined_rollout((ANN, BOB), environment, 2, ask)
    assert crowd.most == most


def test_an_exception_in_a_group_reaches_the_caller():
    tape = Tape(
        {"router": ["[No Retrieval]"] * 2}, replies={"answer_direct": lambda request: 1 / 0}
    )
    with pytest.raises(ZeroDivisionError):
        pipelined_rollout((ANN, BOB), tape.environment(), 2, roll_out)


def test_fewer_than_one_group_is_refused():
    with pytest.raises(UserError, match="pipeline_groups is 0"):
        Run(1, pipeline_groups=0)
