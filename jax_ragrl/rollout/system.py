"""The interface of a system: a pure state machine over effects, and the base class of its states.

A system never performs an effect. The rollout asks `next_effects` for the effects that a state
waits for, performs them, and passes the replies to `advance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Effect
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.runtime.records import declare
from jax_ragrl.types import Hits, Passage, Question

# The reply to one effect: to `Generate`, to `Search`, to `CallLLM`.
Reply = ParsedAction | Hits | str


class State:
    """Base class of the states of all systems: the fields that rollouts, metrics and reports read.

    A system's own state is a frozen dataclass that inherits these defaults and declares the fields
    that it uses. (This class is not a dataclass itself: it would fix the order of the fields.)

    Fields:
      depth: the number of decision levels so far.
      strategy: the strategy that the rollout chose; empty before the choice, and None if the system
        has no strategies.
      faults: errors that the state corrected instead of ending the rollout.
      candidates: the passages that a reading role (filter, selector) chooses from.
      documents: the passages that the rollout uses.
    """

    depth: int = 0
    strategy: str | None = None
    faults: tuple[str, ...] = ()
    candidates: tuple[Passage, ...] = ()
    documents: tuple[Passage, ...] = ()


# States travel between processes and into checkpoints, with the replies and effects that they hold.
declare(State, Reply, Effect)


class System(Protocol):
    """A system of language-model agents.

    States are values: a branch of the rollout copies its state. `next_effects` and `advance` accept
    the states of this system, and `advance` the replies to its effects: a `Reply`, or a tuple of
    replies in the order of the effects if `next_effects` returned several. Both must be pure.
    """

    @property
    def style(self) -> str:
        """The folder of the prompts."""

    @property
    def top_k(self) -> int:
        """The number of passages per search."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """The roles by name."""

    def start(self, question: Question) -> State:
        """Returns the initial state of a question."""

    def next_effects(self, state: Any) -> Effect | tuple[Effect, ...]:
        """Returns the effect, or effects, that a state waits for; `Done` alone ends the rollout."""

    def advance(self, state: Any, reply: Any) -> State:
        """Returns the state after the reply."""


def check_members(system: Any) -> None:
    """Checks that an object has the members of `System` that every run reads.

    Raises:
      UserError: it lacks some; a run would fail long after its first line.
    """
    # `top_k` is read by baselines and by the search of `serve` only: a system need not search.
    names = [name for name in vars(System) if not name.startswith("_") and name != "top_k"]
    if missing := [name for name in names if not hasattr(system, name)]:
        raise UserError(
            f"the system {type(system).__name__} has no {', '.join(missing)}: a system needs "
            f"{', '.join(names)} (see jax_ragrl.rollout.system.System)"
        )
