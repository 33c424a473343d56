"""Rollouts in shards or without lockstep give the forest of the whole batch in lockstep."""

import dataclasses
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.rollout import collect as rollout_loop
from jax_ragrl.rollout import data_parallel
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.data_parallel import merge_shards, own_shard, shard_questions
from jax_ragrl.rollout.expand import Expander, Tree, single_chain
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.runtime import records
from jax_ragrl.types import LLMRequest, Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, leaves_of, system

CY, DEE, EVE = (Question(f"q-{n}", f"Where was {n} born?", ("Ulm",)) for n in ("Cy", "Dee", "Eve"))
# A batch that spans two epochs, so that some questions occur again.
BATCH = (ANN, BOB, CY, ANN, BOB, DEE, EVE, ANN)
TREE = dataclasses.replace(PAPER, free_samples=1)
PURPOSES = ("answer_direct", "answer", "roadmap")


def reply(request: LLMRequest) -> str | EffectError:
    """Requests about Bob fail, and those about Dee unless they answer from documents."""
    prompt = request.messages[-1].content
    if "Bob" in prompt or ("Dee" in prompt and request.purpose != "answer"):
        return EffectError(f"no answer to {request.purpose} of seed {request.seed}")
    return f"answer {request.seed}"


def rollout(
    questions: Sequence[Question], rollouts: int, copies: Sequence[Sequence[int]] | None = None
) -> Forest:
    tape = Tape(improvise, replies=dict.fromkeys(PURPOSES, reply))
    tree = TREE if rollouts == 1 else Tree(width=2, branching_depth=2)
    environment = tape.environment()
    return collect(system(), tree, questions, environment, seed=7, rollouts=rollouts, copies=copies)


def roll_out_shard(shard: Mapping[int, Sequence[int]], rollouts: int) -> Forest:
    return rollout([BATCH[i] for i in shard], rollouts, [*shard.values()])


def assert_equal(one: Forest, other: Forest) -> None:
    for name, a, b in zip(Forest._fields, one, other, strict=True):
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=name, strict=True)
        else:
            assert a == b, name


@pytest.mark.parametrize("rollouts", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 25, 40])
def test_merged_shards_equal_the_forest_of_the_whole_batch(count: int, rollouts: int):
    """Copies of a question have their own seeds, failures are merged, some shards are empty."""
    expected = rollout(BATCH, rollouts)
    assert len(expected.records) > 60 and set(expected.failed_questions) >= {1, 4, 5}
    shards = shard_questions(BATCH, count, rollouts)
    parts = [roll_out_shard(shard, rollouts) for shard in shards]
    parts = records.loads(records.dumps(parts))
    forest = merge_shards(BATCH, parts, rollouts)
    # Of several errors of a question, on several shards, one is kept.
    assert all(message.startswith("no answer to") for message in forest.failures)
    assert count > 5 or forest.failures == expected.failures
    assert_equal(forest._replace(failures=expected.failures), expected)


@pytest.mark.parametrize(
    ("batch", "count", "rollouts", "shards"),
    [
        # Balanced, and copies of a question stay together, for they share its prompt.
        ((ANN, BOB, CY, DEE, EVE), 2, 1, [{0: [0], 2: [0], 4: [0]}, {1: [0], 3: [0]}]),
        ((ANN, BOB, BOB), 2, 1, [{0: [0]}, {1: [0], 2: [0]}]),
        ((ANN, BOB), 1, 2, [{0: [0, 1], 1: [0, 1]}]),
        # Processes that outnumber the questions share their rollouts; the rest roll out nothing.
        ((ANN, BOB), 3, 4, [{0: [0, 2]}, {1: [0, 1, 2, 3]}, {0: [1, 3]}]),
        ((ANN, BOB), 5, 1, [{0: [0]}, {1: [0]}, {}, {}, {}]),
    ],
)
def test_shards_are_disjoint_and_balanced(batch, count, rollouts, shards):
    assert shard_questions(batch, count, rollouts) == shards


@pytest.mark.parametrize("host", [0, 1, 2])
def test_each_process_has_its_shard(monkeypatch, host: int):
    shard = shard_questions(BATCH, 3, rollouts=2)[host]
    monkeypatch.setattr(data_parallel.jax, "process_count", lambda: 3)
    monkeypatch.setattr(data_parallel.jax, "process_index", lambda: host)
    own, copies = own_shard(BATCH, rollouts=2)
    assert own == [BATCH[i] for i in shard] and copies == [*shard.values()]


def test_a_batch_without_questions_has_an_empty_forest():
    empty = rollout((), 1)
    assert_equal(merge_shards((), [empty, empty]), empty)
    assert empty.parent_N.dtype == np.int32 and empty.leaf_N.dtype == bool


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


def search_for_bob(role: str, prompt: str, rng: random.Random) -> str:
    if role == "filter":
        return "Thought: t\nAction: [1]"
    return "[No Retrieval]" if "Ann" in prompt else "[Retrieval] Bob"


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

    tape = Tape(search_for_bob, replies=dict.fromkeys(PURPOSES, answer))
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

    tape = Device(act, replies={"roadmap": roadmap})
    questions = (ANN, CY, DEE, EVE)
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

    def answer(request: LLMRequest) -> str:
        return "Ulm" if is_searched.wait(20) else "late"

    tape = Searching(search_for_bob, replies=dict.fromkeys(PURPOSES, answer))
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


def test_a_failed_question_costs_nothing_more_and_an_exception_reaches_the_caller():
    """Other branches of the question are dropped before their next effect."""
    tape = Tape(improvise, replies=dict.fromkeys(PURPOSES, EffectError("down")))
    forest = collect(system(), TREE, (ANN,), tape.environment(), lockstep=False)
    assert forest.has_failed and forest.failures == ("down",)
    assert len(tape.log) < 20
    tape = Tape(improvise, replies={"answer_direct": lambda request: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        roll_out(tape, TREE, lockstep=False)
