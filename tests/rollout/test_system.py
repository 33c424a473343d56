"""The interface of a system, and the execution of its steps."""

import copy
import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import CallLLM, Done, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role, parse_action
from jax_ragrl.rollout.system import (
    Execution,
    Fault,
    Shown,
    Steps,
    StrategyChoice,
    Used,
    all_of,
    check_members,
)
from jax_ragrl.runtime import records
from jax_ragrl.types import Hits, LLMRequest, Question, Sampling
from tests.rollout.tape import ANN, passage

HITS = Hits((passage(1), passage(2)), (1.0, 0.5))


class Counted:
    """A search, then a choice that is noted; counts the steps that were run."""

    def __init__(self) -> None:
        self.runs = 0

    def steps(self, question: Question) -> Steps:
        self.runs += 1
        yield StrategyChoice("")
        hits = yield Search(question.text, 2)
        yield Shown(hits.passages)
        action = yield Generate("role", ())
        yield StrategyChoice(action.action)
        yield Used(hits.passages[:1])
        if not action.valid:
            yield Fault(action.error)
        yield Done(action.action)


def test_a_state_is_data_with_notes():
    start = Execution(Counted(), ANN)
    assert (start.state.strategy, start.state.faults, start.state.candidates) == ("", (), ())
    reads = start.advance(HITS)
    assert (reads.state.candidates, reads.state.documents) == (HITS.passages, ())
    end = reads.advance(ParsedAction("x", valid=False, error="No X"))
    assert (end.state.strategy, end.state.faults) == ("x", ("No X",))
    assert (end.state.candidates, end.state.documents) == (HITS.passages, HITS.passages[:1])
    # It holds the replies and notes, but no generator.
    assert copy.deepcopy(reads.state) == records.loads(records.dumps(reads.state)) == reads.state
    assert json.loads(json.dumps(dataclasses.asdict(reads.state)))["question"]["id"] == ANN.id


def test_a_branch_repeats_the_replies_and_a_single_chain_does_not():
    system = Counted()
    reads = Execution(system, ANN).advance(HITS)
    ends = [reads.advance(ParsedAction(name)) for name in "abb"]
    assert [end.effects for end in ends] == [(Done(name),) for name in "abb"]
    assert ends[1].state == ends[2].state != ends[0].state
    assert ends[0].state.replies == (HITS, ParsedAction("a")) and system.runs == 3


def test_impure_steps_cannot_branch():
    counter = itertools.count()
    impure = SimpleNamespace(steps=lambda question: iterate(Search(str(next(counter)), 1)))
    start = Execution(impure, ANN)
    start.advance(HITS)
    with pytest.raises(UserError, match="other effects for the same question and replies"):
        start.advance(HITS)


def iterate(value: Any) -> Steps:
    yield value
    yield Done("end")


FAULTY = [Done(5), Done(None, 5), Generate("role", ("text",)), Search(None, 1), Search("x", "1")]


@pytest.mark.parametrize(
    "value",
    [
        *("text", None, (), ("text",), [Done("x")], *FAULTY),
        *(CallLLM("text"), (Done("x"), Search("x", 1)), (Search("x", 1), Done("x"))),
    ],
)
def test_a_value_that_is_no_effect_is_refused(value):
    with pytest.raises(UserError, match="which a rollout cannot perform: yield an effect"):
        Execution(SimpleNamespace(steps=lambda question: iterate(value)), ANN)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda question: iterate(1 / 0), "raised ZeroDivisionError.*test_system.py, line"),
        (lambda question: (1 / 0 for _ in "a"), "raised ZeroDivisionError.*test_system.py, line"),
        (lambda: iterate(Done("x")), "raised TypeError"),
        (lambda question: None, "returned None: make it a generator"),
        (lambda question: [Done("x")], "returned .*: make it a generator"),
    ],
)
def test_an_error_of_own_steps_is_named_with_its_line(steps, message: str):
    with pytest.raises(UserError, match=message):
        Execution(SimpleNamespace(steps=steps), ANN)


def test_steps_without_an_answer_are_refused_and_missing_members_named():
    run = Execution(SimpleNamespace(steps=lambda question: (x for x in (Search("a", 1),))), ANN)
    with pytest.raises(UserError, match="ended without an answer"):
        run.advance(HITS)
    with pytest.raises(UserError, match="SimpleNamespace has no style, steps: a system needs"):
        check_members(SimpleNamespace(roles={}, start=0))


@pytest.mark.parametrize("value", [Fault("x"), Search("a", 1), (Search("a", 1), Search("b", 1))])
def test_steps_that_never_end_are_named(value):
    system = SimpleNamespace(steps=lambda question: (x for x in itertools.repeat(value, 3000)))
    with pytest.raises(UserError, match="had 1000 (notes|replies), the last .* without Done"):
        run = Execution(system, ANN)
        while True:
            run = run.advance(HITS)


ROLE = Role("r", ParsedAction)
FAULTY_SAMPLING = [Sampling(-1.0), Sampling("hot"), Sampling(1.0, 0.0), Sampling(1.0, 1.0, 0)]


@pytest.mark.parametrize(
    "roles",
    [
        *(None, [ROLE], lambda: {"r": ROLE}, {"r": "role"}),
        *({name: Role(name, ParsedAction)} for name in ("", "leaf", "a\nb", 1)),
        {"other": ROLE},
        *({"r": Role("r", ParsedAction, x)} for x in FAULTY_SAMPLING),
    ],
)
def test_roles_are_a_mapping_from_names_to_roles(roles):
    with pytest.raises(UserError, match="the roles of the system SimpleNamespace are"):
        check_members(SimpleNamespace(roles=roles, style="tiny", steps=iterate))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_several_effects_have_one_reply_each(count):
    def steps(question: Question) -> Steps:
        replies = yield from all_of([CallLLM(LLMRequest(str(i), ())) for i in range(count)])
        yield Done(repr(replies))

    run = Execution(SimpleNamespace(steps=steps), ANN)
    if count:
        assert len(run.effects) == count
        run = run.advance(("a", "b") if count > 1 else "a")
    assert run.effects == (Done(repr(("a", "b")[:count])),)


@pytest.mark.parametrize("parse", [lambda text: None, str, lambda text: 1 / 0])
def test_a_parser_that_raises_or_returns_no_action_is_named(parse):
    with pytest.raises(UserError, match="the parser of role 'r' (returned|raised)"):
        parse_action(Role("r", parse), "text")
