"""Actions that are sampled as a stream, while replies to other branches arrive."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jax_ragrl.rollout.collect import ActionRequest, collect
from jax_ragrl.rollout.effects import CallLLM, Done, Generate
from jax_ragrl.rollout.expand import Branching, ForcedAction, Tree, single_chain
from jax_ragrl.rollout.pending import TOO_LONG
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Steps
from jax_ragrl.rollout.tree import Action
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import LLMRequest, Message, Question, Sampling
from tests.rollout.tape import ANN, BOB, Tape
from tests.tiny import split_policy, tokenizer

SLOTS = Shapes((64, 256), (4,), max_new_tokens=32, initial_cache_size=32, decode_rows=8)
BATCHES = dataclasses.replace(SLOTS, decode_rows=0)
LONG = Sampling(max_tokens=32)
ASK = Role("ask", ParsedAction, sampling=LONG)
JUDGE = Role("judge", ParsedAction, sampling=Sampling(max_tokens=6), policy="other")


def sampler(shapes: Shapes) -> PolicySampler:
    models = {"policy": split_policy(), "other": split_policy(1)}
    return PolicySampler(models, tokenizer(), shapes)


def request(text: str, role: Role = ASK, seed: int = 0, samples: int = 1) -> ActionRequest:
    return ActionRequest(role, (Message("user", text),), Branching(samples=samples), seed)


def forced(*actions: ForcedAction) -> ActionRequest:
    return request("who?")._replace(branching=Branching(forced_actions=actions, samples=2))


WAVES = [
    [request("who directed the film?", seed=1), request("route", JUDGE, 2, 2)],
    [forced(ForcedAction("[LLM]"), ForcedAction("[Ret", complete=False))],
    [request("w" * 400), request("who?", JUDGE, seed=5)],
    [request("film", seed=seed) for seed in range(4)],
]


def stream(own: Any, waves: Sequence[Sequence[ActionRequest]]) -> dict[int, list[Action]]:
    rest = iter(waves[1:])
    return dict(own.stream(waves[0], lambda: next(rest, [])))


def assert_equal_actions(actual: Sequence[Action], expected: Sequence[Action]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one._replace(logps=None) == other._replace(logps=None)
        assert (one.logps is None) == (other.logps is None)
        assert one.logps is None or pytest.approx(one.logps, abs=1e-5) == other.logps


@pytest.mark.parametrize("shapes", [SLOTS, BATCHES])
def test_a_stream_has_the_actions_of_one_call(shapes: Shapes):
    """Of several policies and roles, forced ones, and of a prompt that is too long."""
    requests = [request for wave in WAVES for request in wave]
    actions = stream(sampler(shapes), WAVES)
    for n, expected in enumerate(sampler(BATCHES).sample(requests)):
        assert_equal_actions(actions[n], expected)
    assert len(actions) == len(requests) and actions[3][0].error == TOO_LONG
    assert [len(actions[n]) for n in range(3)] == [1, 2, 4]


def test_a_stream_without_jobs_takes_what_arrives():
    long, short = request("w" * 400), request("who?")
    actions = stream(sampler(SLOTS), [[long], [short]])
    assert actions[0][0].error == TOO_LONG and actions[1][0].ids


def test_jobs_of_another_policy_have_their_turn():
    """While they wait, no further requests of the first policy take its slots."""
    own, order = sampler(SLOTS), []
    films = [[request("film", seed=n)] for n in range(30)]
    waves = iter([[request("who?", JUDGE), *films[0]], *films[1:]])
    for number, _ in own.stream([request("route")], lambda: next(waves, [])):
        order.append(number)
    assert sorted(order) == [*range(32)] and order.index(1) <= 2


@dataclasses.dataclass(frozen=True)
class Conversation:
    """An action and a reply of the language model, three times."""

    @property
    def roles(self) -> dict[str, Role]:
        return {"ask": ASK}

    def steps(self, question: Question) -> Steps:
        for turn in range(3):
            prompt = (Message("user", f"turn {turn} {question.text}"),)
            yield Generate("ask", prompt)
            yield CallLLM(LLMRequest("answer", prompt))
        yield Done("end")


@pytest.mark.parametrize("shapes", [SLOTS, BATCHES])
def test_an_early_rollout_with_a_stream_has_the_forest_of_lockstep(shapes: Shapes):
    tree = Tree(width=2, branching_depth=1)
    forests = [
        collect(
            Conversation(),
            tree,
            (ANN, BOB),
            Tape({}).environment()._replace(sampler=own),
            rollouts=3,
            lockstep=lockstep,
        )
        for own, lockstep in ((sampler(BATCHES), True), (sampler(shapes), False))
    ]
    expected, actual = (forest.records for forest in forests)
    assert len(expected) == len(actual) > 40
    for one, other in zip(actual, expected, strict=True):
        assert (one.path, one.parent, one.answer) == (other.path, other.parent, other.answer)
        if one.action is not None and other.action is not None:
            assert_equal_actions([one.action], [other.action])


class Observer:
    """A sampler that waits for an event while the second action about Ann is sampled."""

    def __init__(self, own: PolicySampler, event: threading.Event) -> None:
        self.own, self.event, self.is_sampling = own, event, threading.Event()
        self.begun: list[str] = []
        self.arrived: list[str] = []

    def stream(self, requests: Sequence[ActionRequest], arrivals: Any) -> Any:
        self.begun += [r.messages[0].content for r in requests]

        def observed() -> Sequence[ActionRequest]:
            if any("turn 1" in prompt and "Ann" in prompt for prompt in self.begun + self.arrived):
                self.is_sampling.set()
                assert self.event.wait(20)
            further = arrivals()
            self.arrived += [r.messages[0].content for r in further]
            return further

        yield from self.own.stream(requests, observed)


@pytest.mark.parametrize("shapes", [SLOTS, BATCHES])
def test_a_branch_joins_the_stream_that_samples_another_one(shapes: Shapes):
    """The first reply to Bob arrives during the second action about Ann."""
    is_answered = threading.Event()
    observer = Observer(sampler(shapes), is_answered)

    def answer(llm_request: LLMRequest) -> str:
        prompt = llm_request.messages[0].content
        if "turn 0" in prompt and "Bob" in prompt:
            assert observer.is_sampling.wait(20)
            threading.Timer(0.2, is_answered.set).start()
        return "Ulm"

    environment = Tape({}, replies={"answer": answer}).environment()._replace(sampler=observer)
    forest = collect(Conversation(), single_chain, (ANN, BOB), environment, lockstep=False)
    assert forest.leaf_N.sum() == 2
    assert any("turn 1" in prompt and "Bob" in prompt for prompt in observer.arrived)
