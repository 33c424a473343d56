"""The interface of a system: one generator per question, which yields effects and receives replies.

A system never performs an effect. An `Execution` runs the generator of a question up to the effects
that it waits for; the rollout performs them and passes the replies to `Execution.advance`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeVar

from jax_ragrl.config.functions import own_code
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import CallLLM, CallTool, Done, Effect, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.tools import ToolResult
from jax_ragrl.rollout.tree import LEAF
from jax_ragrl.runtime.records import declare
from jax_ragrl.types import Hits, LLMRequest, Message, Passage, Question

# The reply to one effect: to `Generate`, to `Search`, to `CallLLM`.
Reply = ParsedAction | Hits | ToolResult | str


class Fault(NamedTuple):
    """A note that the system corrected an error instead of ending the rollout."""

    error: str


class StrategyChoice(NamedTuple):
    """A note of the strategy that the rollout chose; empty before the choice."""

    strategy: str


class Shown(NamedTuple):
    """A note of the passages that a role is about to read, such as a filter's candidates."""

    passages: tuple[Passage, ...]


class Used(NamedTuple):
    """A note of the passages that the rollout uses for its answer."""

    passages: tuple[Passage, ...]


# A generator yields an effect, a tuple of effects, or a note: a named tuple that is no effect. It
# receives the reply to an effect, a tuple of replies to several effects, and None for a note.
Steps = Generator[Effect | tuple[Any, ...], Any, Any]
AnyNote = TypeVar("AnyNote", bound=tuple[Any, ...])
# Replies in one rollout, and notes before one effect: steps with more never end, and would cost a
# language model's price each.
MOST = 1000


@dataclasses.dataclass(frozen=True)
class State:
    """A question and the replies so far, from which every rollout can be repeated.

    The reply to a step is a tuple if the step has several effects. `notes` come before the effects
    that the question waits for.
    """

    question: Question
    replies: tuple[Reply | tuple[Reply, ...], ...] = ()
    notes: tuple[tuple[Any, ...], ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        """The errors that the system corrected instead of ending the rollout."""
        return tuple(note.error for note in self.notes if isinstance(note, Fault))

    @property
    def strategy(self) -> str | None:
        """The strategy of the rollout: empty before the choice, None if there are no strategies."""
        # A system that calls another one may note a strategy twice: the last one counts.
        note = self.latest(StrategyChoice)
        return note.strategy if note else None

    @property
    def candidates(self) -> tuple[Passage, ...]:
        """The passages that a reading role (filter, selector) chooses from."""
        note = self.latest(Shown)
        return note.passages if note else ()

    @property
    def documents(self) -> tuple[Passage, ...]:
        """The passages that the rollout uses."""
        note = self.latest(Used)
        return note.passages if note else ()

    def latest(self, kind: type[AnyNote]) -> AnyNote | None:
        """Returns the last note of a class; None if there is none."""
        return next((note for note in reversed(self.notes) if isinstance(note, kind)), None)


# States travel between processes and into checkpoints, with the replies and notes that they hold.
declare(State, Reply, Effect, Fault, StrategyChoice, Shown, Used)


class System(Protocol):
    """A system of language-model agents."""

    @property
    def style(self) -> str:
        """The folder of the prompts."""

    @property
    def top_k(self) -> int:
        """The number of passages per search."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """The roles by name."""

    def steps(self, question: Question) -> Steps:
        """Yields the effects of a question in order, and notes; the last effect is `Done`.

        The effects must be a pure function of the question and the replies: branches of a rollout
        repeat them.
        """


class Execution:
    """A system's work on one question, suspended at the effects that it waits for.

    An execution is a value: `advance` may be called once per branch. The first call continues the
    suspended generator; each later one repeats the recorded replies in a new generator. `Done`
    alone among the effects ends the rollout.
    """

    def __init__(self, system: System, question: Question):
        self._system = system
        self._steps: Steps | None = _started(system, question)
        self.effects, notes = _next_effects(self._steps, None)
        self.state = State(question, (), notes)

    def advance(self, reply: Reply | tuple[Reply, ...]) -> Execution:
        """Returns the execution after a reply; after a tuple of replies to several effects."""
        state, steps, self._steps = self.state, self._steps, None
        if len(state.replies) == MOST:
            name = f"{type(self._system).__name__}.steps"
            raise _endless(name, f"replies, the last to {self.effects[-1]!r:.80},")
        if steps is None:
            steps = _started(self._system, state.question)
            for earlier in (None, *state.replies):
                effects, _ = _next_effects(steps, earlier)
            if effects != self.effects:
                raise UserError(
                    f"{type(self._system).__name__}.steps yielded other effects for the same "
                    "question and replies, so a rollout cannot branch: make it a pure function of "
                    "both, without random numbers or counters of its own"
                )
        after = object.__new__(Execution)
        after._system, after._steps = self._system, steps
        after.effects, notes = _next_effects(steps, reply)
        after.state = State(state.question, (*state.replies, reply), state.notes + notes)
        return after


def before_last_reply(system: System, state: State) -> Execution:
    """Returns the execution of a system that waited for the last reply of a state."""
    execution = Execution(system, state.question)
    for reply in state.replies[:-1]:
        execution = execution.advance(reply)
    return execution


def _started(system: System, question: Question) -> Steps:
    name = f"{type(system).__name__}.steps"
    with own_code(name):
        steps = system.steps(question)
    if not isinstance(steps, Generator):
        raise UserError(f"{name} returned {steps!r:.80}: make it a generator, which yields effects")
    return steps


def _next_effects(
    steps: Steps, reply: Any
) -> tuple[tuple[Effect, ...], tuple[tuple[Any, ...], ...]]:
    """Sends a reply (None starts the generator); returns the next effects, and the notes before."""
    notes: list[tuple[Any, ...]] = []
    name = getattr(steps, "__qualname__", "steps")
    with own_code(name):
        try:
            value = steps.send(reply)
            while not isinstance(value, Effect) and hasattr(value, "_fields"):
                notes.append(value)
                if len(notes) > MOST:
                    raise _endless(name, f"notes, the last {value!r:.80},")
                value = next(steps)
        except StopIteration:
            raise UserError(
                f"{name} ended without an answer: a system yields Done(answer) as its last effect, "
                "or Done(None, reason)"
            ) from None
    effects = (value,) if isinstance(value, Effect) else value
    is_whole = isinstance(effects, tuple) and effects and all(map(_is_complete, effects))
    if is_whole and (len(effects) == 1 or not any(isinstance(e, Done) for e in effects)):
        return effects, tuple(notes)
    raise UserError(
        f"{name} yielded {value!r:.80}, which a rollout cannot perform: yield an effect with the "
        "fields that jax_ragrl.rollout.effects describes, a tuple of effects other than Done, or a "
        "note such as Fault"
    )


def _endless(name: str, what: str) -> UserError:
    return UserError(
        f"{name} had {MOST} {what} without Done: end it after a number of turns of your own"
    )


def _is_complete(effect: Any) -> bool:
    """Whether an object is an effect, with fields of the types that performing it needs."""
    match effect:
        case Generate(str(), Sequence() as messages):
            return all(isinstance(message, Message) for message in messages)
        case Search(str(), SupportsIndex()) | CallLLM(LLMRequest()) | CallTool(str(), Mapping()):
            return True
        case Done(str() | None, str()):
            return True
    return False


def all_of(effects: Sequence[Effect]) -> Steps:
    """Yields several effects at once; returns a tuple with one reply per effect."""
    # A lone reply comes without a tuple around it.
    if len(effects) == 1:
        return ((yield effects[0]),)
    return (yield tuple(effects)) if effects else ()


def check_members(system: Any) -> None:
    """Checks that an object has the members of `System` that every run reads, and its roles.

    Raises:
      UserError: it lacks some, or has others; a run would fail long after its first line.
    """
    # `top_k` is read by baselines and by the search of `serve` only: a system need not search.
    names = [name for name in vars(System) if not name.startswith("_") and name != "top_k"]
    if missing := [name for name in names if not hasattr(system, name)]:
        raise UserError(
            f"the system {type(system).__name__} has no {', '.join(missing)}: a system needs "
            f"{', '.join(names)} (see jax_ragrl.rollout.system.System)"
        )
    roles = system.roles
    if not (isinstance(roles, Mapping) and all(map(_is_role, roles, roles.values()))):
        raise UserError(
            f"the roles of the system {type(system).__name__} are {roles!r:.200}: make them a "
            f"mapping from names, printable and not {LEAF!r}, to the Role of that name, whose "
            "Sampling has a temperature from 0, top_p above 0 to 1 and max_tokens from 1"
        )


def _is_role(name: Any, role: Any) -> bool:
    # The rows and metrics of a name are on one line; leaves have a role of their own.
    if not (isinstance(role, Role) and isinstance(name, str) and name.isprintable()):
        return False
    match role.sampling:
        case (float() | int() as temperature, float() | int() as top_p, int() as tokens):
            # The learner finds a grammar by the name of its role, the rollout by the mapping's.
            is_named = name == role.name and name not in ("", LEAF)
            return is_named and temperature >= 0 < top_p <= 1 <= tokens
    return False
