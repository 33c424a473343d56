"""Actions of policies do not depend on which requests are sampled together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from jax_ragrl.rollout.collect import ActionRequest, collect
from jax_ragrl.rollout.effects import CallLLM, Done, Generate
from jax_ragrl.rollout.expand import Branching, ForcedAction, Tree
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import TOO_LONG, ParsedAction, Role
from jax_ragrl.rollout.system import Steps
from jax_ragrl.rollout.tree import Action
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import LLMRequest, Message, Question, Sampling
from tests.rollout.tape import ANN, BOB, Tape
from tests.tiny import split_policy, tokenizer

SHAPES = Shapes((64, 256), (4,), max_new_tokens=32)
ASK = Role("ask", ParsedAction, sampling=Sampling(max_tokens=32))
JUDGE = Role("judge", ParsedAction, sampling=Sampling(max_tokens=6), policy="other")


def sampler() -> PolicySampler:
    models = {"policy": split_policy(), "other": split_policy(1)}
    return PolicySampler(models, tokenizer(), SHAPES)


def request(text: str, role: Role = ASK, seed: int = 0, samples: int = 1) -> ActionRequest:
    return ActionRequest(role, (Message("user", text),), Branching(samples=samples), seed)


def forced(*actions: ForcedAction) -> ActionRequest:
    return request("who?")._replace(branching=Branching(forced_actions=actions, samples=2))


def assert_equal_actions(actual: Sequence[Action], expected: Sequence[Action]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one._replace(logps=None) == other._replace(logps=None)
        assert (one.logps is None) == (other.logps is None)
        assert one.logps is None or pytest.approx(one.logps, abs=1e-5) == other.logps


def test_requests_of_several_policies_have_the_actions_of_each_alone():
    """Forced ones, and a prompt that is too long, among them."""
    requests = [
        request("who directed the film?", seed=1),
        request("route", JUDGE, 2, 2),
        forced(ForcedAction("[LLM]"), ForcedAction("[Ret", complete=False)),
        request("w" * 400),
        *(request("film", seed=seed) for seed in range(4)),
    ]
    actions = sampler().sample(requests)
    for own, together in zip(requests, actions, strict=True):
        assert_equal_actions(together, sampler().sample([own])[0])
    assert [len(own) for own in actions] == [1, 2, 4, 1, 1, 1, 1, 1]
    assert actions[3][0].error == TOO_LONG


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


def test_a_rollout_without_lockstep_has_the_forest_of_lockstep():
    environment = Tape({}).environment()._replace(sampler=sampler())
    forests = [
        collect(
            *(Conversation(), Tree(width=2, branching_depth=1), (ANN, BOB), environment),
            rollouts=3,
            lockstep=lockstep,
        )
        for lockstep in (True, False)
    ]
    expected, actual = (forest.records for forest in forests)
    assert len(expected) == len(actual) > 40
    for one, other in zip(actual, expected, strict=True):
        assert (one.path, one.parent, one.answer) == (other.path, other.parent, other.answer)
        if one.action is not None and other.action is not None:
            assert_equal_actions([one.action], [other.action])
