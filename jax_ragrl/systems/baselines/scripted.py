"""Systems of frozen roles, written as one generator: it yields effects and is sent the replies.

A state is the question and the replies so far. To go on, the generator runs again from the start
on those replies, up to the effect that it then waits for: so a state stays a value, a branch is a
copy, and a rollout can be replayed from its record. `steps` must be a pure function of the question
and the replies.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.rollout.effects import Ask, Done, Effect
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.text.prompts import numbered, template, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

GREEDY = Sampling(0.0, 1.0, 256)
MAX_QUERY_WORDS = 100


class Fault(NamedTuple):
    """Yielded where a reply was malformed, to be counted; nothing is waited for."""

    error: str


class Chosen(NamedTuple):
    """Yielded where a strategy was chosen, to be counted; nothing is waited for."""

    strategy: str


Steps = Generator[Effect | tuple[Effect, ...] | Fault | Chosen, Any, Any]


@dataclasses.dataclass(frozen=True)
class State:
    """Where a question stands: the replies so far, and what they lead to."""

    question: Question
    replies: tuple[Any, ...] = ()
    wants: Effect | tuple[Effect, ...] = Done(None)
    faults: tuple[str, ...] = ()
    strategy: str | None = None


@dataclasses.dataclass(frozen=True)
class Scripted(abc.ABC):
    """A system that is a script. `top_k` passages a search; `style` names the prompts."""

    style: str = "baselines"
    top_k: int = 5

    @property
    def roles(self) -> Mapping[str, Role]:
        """No role is trained, unless a script says so."""
        return {}

    @abc.abstractmethod
    def steps(self, question: Question) -> Steps:
        """The effects of a question in order, `Done` the last."""

    def start(self, question: Question) -> State:
        """The state before the first effect."""
        return self._run(question, ())

    def wants(self, state: State) -> Effect | tuple[Effect, ...]:
        """What the state waits for."""
        return state.wants

    def advance(self, state: State, reply: Any) -> State:
        """The state after one more reply."""
        return self._run(state.question, (*state.replies, reply))

    def _run(self, question: Question, replies: tuple[Any, ...]) -> State:
        steps = self.steps(question)
        notes: list[Fault | Chosen] = []
        wanted = _noted(steps, next(steps), notes)
        for reply in replies:
            wanted = _noted(steps, steps.send(reply), notes)
        faults = tuple(note.error for note in notes if isinstance(note, Fault))
        chosen = [note.strategy for note in notes if isinstance(note, Chosen)]
        return State(question, replies, wanted, faults, chosen[-1] if chosen else None)


def _noted(steps: Steps, wanted: Any, notes: list[Fault | Chosen]) -> Any:
    """The next effect; the notes before it are kept."""
    while isinstance(wanted, Fault | Chosen):
        notes.append(wanted)
        wanted = next(steps)
    return wanted


def ask(style: str, name: str, **values: str) -> Ask:
    """One question to the frozen language model, by the prompt `name`; greedy."""
    return say(name, user_turn(style, name, **values))


def say(purpose: str, messages: Sequence[Message]) -> Ask:
    """A conversation with the frozen language model; greedy."""
    return Ask(LLMRequest(purpose, tuple(messages), GREEDY))


def all_of(effects: Sequence[Effect]) -> Steps:
    """Several effects at once; a tuple of as many replies."""
    if len(effects) == 1:
        return ((yield effects[0]),)
    return (yield tuple(effects)) if effects else ()


def checked(parsed: Parsed) -> Steps:
    """A parsed reply as it is; a malformed one is counted."""
    if not parsed.valid:
        yield Fault(parsed.error)
    return parsed


def told(style: str, name: str, **values: str) -> Message:
    """A later user turn of a conversation."""
    return Message("user", template(style, name).substitute(values))


def answer(style: str, question: Question, documents: Sequence[Passage]) -> Steps:
    """The answer of the language model from passages, or from what it knows."""
    name = "answer" if documents else "answer_direct"
    values = {"question": question.text, "documents": numbered(style, documents)}
    return (yield ask(style, name, **values))


def finish(style: str, question: Question, documents: Sequence[Passage]) -> Steps:
    """Answers, and ends."""
    text = yield from answer(style, question, documents)
    yield Done(text, "answered")


def merged(*found: Sequence[Passage]) -> tuple[Passage, ...]:
    """All passages in order, each once."""
    return tuple(dict.fromkeys(p for passages in found for p in passages))


def clean_query(text: str) -> str:
    """A search query on one line, at most 100 words."""
    return " ".join(text.split()[:MAX_QUERY_WORDS])
