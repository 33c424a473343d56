"""Cohorts give the forest of one batch, and one is sampled for while another is answered."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.cohorts import in_cohorts
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.train.job import Run
from jax_ragrl.types import LLMRequest, Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, system
from tests.rollout.test_shares import BATCH, assert_equal, reply

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
            self.sampled += 1
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


def test_what_breaks_in_a_cohort_breaks_the_batch():
    tape = Tape({"router": ["[No Retrieval]"] * 2}, told={"answer_direct": lambda request: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        in_cohorts((ANN, BOB), tape.environment(), 2, rolled)


def test_no_cohort_is_no_batch():
    with pytest.raises(UserError, match="cohorts is 0"):
        Run(1, cohorts=0)
