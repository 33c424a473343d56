"""Rollouts without lockstep give the forest of lockstep, and no branch waits for another one."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.rollout import collect as rollout_loop
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import Expander, Tree, single_chain
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.types import LLMRequest, Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, leaves_of, system
from tests.rollout.test_data_parallel import BATCH, CY, assert_equal, reply

TREE = dataclasses.replace(PAPER, free_samples=1)
PURPOSES = ("answer_direct", "answer", "roadmap")


@dataclasses.dataclass
class Uneven(Tape):
    """An environment whose language model takes a random time per call; counts calls at once."""

    sampling: int = 0
    searching: int = 0
    at_once: list[int] = dataclasses.field(default_factory=list)
    threads: set[tuple[str, int]] = dataclasses.field(default_factory=set)

    def sample(self, requests: Sequence[Any]) -> Any:
        self.sampling += 1
        self.at_once.append(self.sampling)
        self.threads.add(("sampler", threading.get_ident()))
        actions = super().sample(requests)
        self.sampling -= 1
        return actions

    def search(self, queries: Sequence[str], k: int) -> list[Any]:
        self.searching += 1
        self.at_once.append(self.searching)
        self.threads.add(("retriever", threading.get_ident()))
        time.sleep(0.001)
        hits = super().search(queries, k)
        self.searching -= 1
        return hits

    def complete(self, requests: Sequence[LLMRequest]) -> list[Any]:
        self.threads.add(("llm", threading.get_ident()))
        time.sleep(random.random() * 0.01)
        return super().complete(requests)


def roll_out(tape: Tape, expander: Expander, *, lockstep: bool, rollouts: int = 1) -> Forest:
    environment = tape.environment()
    return collect(
        system(), expander, BATCH, environment, seed=7, rollouts=rollouts, lockstep=lockstep
    )


@pytest.mark.parametrize(
    ("expander", "rollouts"), [(TREE, 1), (Tree(width=2, branching_depth=2), 3), (single_chain, 2)]
)
def test_the_forest_equals_that_of_lockstep(expander: Expander, rollouts: int):
    replies = dict.fromkeys(PURPOSES, reply)
    script, tape = Tape(improvise, replies=replies), Uneven(improvise, replies=replies)
    expected = roll_out(script, expander, lockstep=True, rollouts=rollouts)
    forest = roll_out(tape, expander, lockstep=False, rollouts=rollouts)
    assert len(expected.records) > 25 and expected.failed_questions
    # Of several errors of a question one is kept.
    assert all(message.startswith("no answer to") for message in forest.failures)
    assert_equal(forest._replace(failures=expected.failures), expected)
    # Samplers and retrievers need not accept concurrent calls.
    assert {*tape.at_once} == {1}


def test_a_slow_reply_delays_its_own_branch_alone():
    """The reply about Ann comes after the whole rollout of Bob, which takes seven rounds."""
    bob_ended = threading.Event()

    def answer(request: LLMRequest) -> str:
        prompt = request.messages[-1].content
        if request.purpose == "answer" and "Bob" in prompt:
            bob_ended.set()
        if "Ann" in prompt:
            return "Ulm" if bob_ended.wait(20) else "late"
        return "Rom"

    def act(role: str, prompt: str, rng: random.Random) -> str:
        if role == "filter":
            return "Thought: t\nAction: [1]"
        return "[No Retrieval]" if "Ann" in prompt else "[Retrieval] Bob"

    tape = Tape(act, replies=dict.fromkeys(PURPOSES, answer))
    forest = collect(system(), single_chain, (ANN, BOB), tape.environment(), lockstep=False)
    assert leaves_of(forest) == [("Ulm", "answered"), ("Rom", "answered")]


def test_replies_that_arrive_during_a_turn_share_the_next_one():
    calls: list[int] = []
    arrived = threading.Barrier(4)

    class Device(Tape):
        def sample(self, requests: Sequence[Any]) -> Any:
            calls.append(len(requests))
            # The first filter is sampled until both other questions have their passages.
            if len(calls) == 2:
                arrived.wait(20)
                time.sleep(0.2)
            return super().sample(requests)

    def roadmap(request: LLMRequest) -> str:
        if "Ann" not in request.messages[-1].content:
            arrived.wait(20)
        return "1. one"

    def act(role: str, prompt: str, rng: random.Random) -> str:
        return "[Planning]" if role == "router" else "Thought: t\nAction: [LLM]"

    dee, eve = (Question(f"q-{n}", f"Where was {n} born?", ("Ulm",)) for n in ("Dee", "Eve"))
    tape = Device(act, replies={"roadmap": roadmap})
    questions = (ANN, CY, dee, eve)
    forest = collect(system(), single_chain, questions, tape.environment(), lockstep=False)
    assert len(leaves_of(forest)) == 4
    assert calls == [4, 1, 3]


def test_a_search_does_not_wait_for_calls_of_the_language_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_loop, "WORKERS", 1)
    is_searched = threading.Event()

    class Searching(Tape):
        def search(self, queries: Sequence[str], k: int) -> list[Any]:
            is_searched.set()
            return super().search(queries, k)

    def act(role: str, prompt: str, rng: random.Random) -> str:
        if role == "filter":
            return "Thought: t\nAction: [1]"
        return "[No Retrieval]" if "Ann" in prompt else "[Retrieval] Bob"

    def answer(request: LLMRequest) -> str:
        return "Ulm" if is_searched.wait(20) else "late"

    tape = Searching(act, replies=dict.fromkeys(PURPOSES, answer))
    forest = collect(system(), single_chain, (ANN, BOB), tape.environment(), lockstep=False)
    assert [answer for answer, _ in leaves_of(forest)] == ["Ulm", "Ulm"]


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_models_on_the_devices_run_in_the_thread_of_the_sampler(on_device: bool, lockstep: bool):
    tape = Uneven(improvise, replies=dict.fromkeys(PURPOSES, "Ulm"))
    tape.on_device = on_device  # type: ignore[attr-defined]
    roll_out(tape, TREE, lockstep=lockstep)
    here = threading.get_ident()
    names = {name for name, thread in tape.threads if thread == here}
    assert names == ({"sampler", "retriever", "llm"} if on_device else {"sampler"})


def test_an_exception_of_a_worker_reaches_the_caller():
    tape = Tape(improvise, replies={"answer_direct": lambda request: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        roll_out(tape, TREE, lockstep=False)


def test_a_failed_question_costs_nothing_more():
    """Other branches of the question are dropped before their next effect."""
    tape = Tape(improvise, replies=dict.fromkeys(PURPOSES, EffectError("down")))
    forest = collect(system(), TREE, (ANN,), tape.environment(), lockstep=False)
    assert forest.has_failed and forest.failures == ("down",)
    assert len(tape.log) < 20
