"""Systems of frozen roles written as one generator, which yields effects and receives the replies.

A state holds the question and the replies so far. Each step runs the generator again from the start
on those replies, up to the next effect. So a state stays a value, a branch is a copy, and a rollout
can be replayed from its record. `steps` must be a pure function of the question and the replies.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.rollout.effects import CallLLM, Done, Effect
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import State as BaseState
from jax_ragrl.text.prompts import format_passages, template, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

# Tables are greedy; 256 tokens suffice for an answer or a list of queries.
GREEDY = Sampling(0.0, 1.0, 256)
MAX_QUERY_WORDS = 100


class Fault(NamedTuple):
    """A note that a reply was malformed; a script yields it for the metrics and gets no reply."""

    error: str


class StrategyChoice(NamedTuple):
    """A note of the strategy in use; a script yields it for the metrics and gets no reply."""

    strategy: str


Steps = Generator[Effect | tuple[Effect, ...] | Fault | StrategyChoice, Any, Any]


@dataclasses.dataclass(frozen=True)
class State(BaseState):
    """The state of a question: the replies so far, and the effects and notes they lead to."""

    question: Question
    replies: tuple[Any, ...] = ()
    effects: Effect | tuple[Effect, ...] = Done(None)
    faults: tuple[str, ...] = ()
    strategy: str | None = None


@dataclasses.dataclass(frozen=True)
class ScriptedSystem(abc.ABC):
    """A system that is a script.

    Fields:
      style: the name of the prompts.
      top_k: the number of passages per search.
    """

    style: str = "baselines"
    top_k: int = 5

    @property
    def roles(self) -> Mapping[str, Role]:
        """The trained roles; none, unless a subclass defines them."""
        return {}

    @abc.abstractmethod
    def steps(self, question: Question) -> Steps:
        """Yields the effects of a question in order; the last one is `Done`."""

    def start(self, question: Question) -> State:
        """Returns the state before the first effect."""
        return self._run(question, ())

    def next_effects(self, state: State) -> Effect | tuple[Effect, ...]:
        """Returns the effects that the state waits for."""
        return state.effects

    def advance(self, state: State, reply: Any) -> State:
        """Returns the state after one more reply."""
        return self._run(state.question, (*state.replies, reply))

    def _run(self, question: Question, replies: tuple[Any, ...]) -> State:
        # 1. Run up to the first effect.
        steps = self.steps(question)
        notes: list[Fault | StrategyChoice] = []
        effect = _next_effect(steps, next(steps), notes)
        # 2. Send the recorded replies, each up to the next effect.
        for reply in replies:
            effect = _next_effect(steps, steps.send(reply), notes)
        faults = tuple(note.error for note in notes if isinstance(note, Fault))
        # A script that calls another one may note a strategy twice: the last one counts.
        strategies = [note.strategy for note in notes if isinstance(note, StrategyChoice)]
        return State(question, replies, effect, faults, strategies[-1] if strategies else None)


def _next_effect(steps: Steps, value: Any, notes: list[Fault | StrategyChoice]) -> Any:
    """Returns the first effect from `value` on; appends the notes before it to `notes`."""
    while isinstance(value, Fault | StrategyChoice):
        notes.append(value)
        value = next(steps)
    return value


def ask(style: str, name: str, **values: str) -> CallLLM:
    """Returns a greedy request to the frozen language model with one user turn.

    Args:
      style: the prompt style.
      name: the name of the prompt, which is also the purpose of the request.
      values: the values of the placeholders in the prompt.
    """
    return ask_messages(name, user_turn(style, name, **values))


def ask_messages(purpose: str, messages: Sequence[Message]) -> CallLLM:
    """Returns a greedy request to the frozen language model with a conversation."""
    return CallLLM(LLMRequest(purpose, tuple(messages), GREEDY))


def all_of(effects: Sequence[Effect]) -> Steps:
    """Yields several effects at once; returns a tuple with one reply per effect."""
    # The rollout sends a lone reply without a tuple around it.
    if len(effects) == 1:
        return ((yield effects[0]),)
    return (yield tuple(effects)) if effects else ()


def report_fault(reply: ParsedAction) -> Steps:
    """Returns a parsed reply as it is; yields a `Fault` first if the reply is malformed."""
    if not reply.valid:
        yield Fault(reply.error)
    return reply


def user_message(style: str, name: str, **values: str) -> Message:
    """Returns a later user turn of a conversation.

    Args:
      style: the prompt style.
      name: the name of the prompt.
      values: the values of the placeholders in the prompt.
    """
    return Message("user", template(style, name).substitute(values))


def answer(style: str, question: Question, documents: Sequence[Passage]) -> Steps:
    """Asks the frozen language model for the answer and returns its reply.

    Args:
      style: the prompt style.
      question: the question.
      documents: the passages in the prompt; if empty, the prompt for answers from memory is used.
    """
    name = "answer" if documents else "answer_direct"
    values = {"question": question.text, "documents": format_passages(style, documents)}
    return (yield ask(style, name, **values))


def finish(style: str, question: Question, documents: Sequence[Passage]) -> Steps:
    """Asks for the answer as `answer` does, with the same arguments, and ends the rollout.

    Args:
      style: the prompt style.
      question: the question.
      documents: the passages in the prompt.
    """
    text = yield from answer(style, question, documents)
    yield Done(text, "answered")


def unique_passages(*groups: Sequence[Passage]) -> tuple[Passage, ...]:
    """Returns all passages of the groups in order, without duplicates."""
    return tuple(dict.fromkeys(p for passages in groups for p in passages))


def clean_query(text: str) -> str:
    """Returns a search query on one line, of at most 100 words."""
    return " ".join(text.split()[:MAX_QUERY_WORDS])
