"""Branches of a rollout in progress, and the effects that they wait for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_ragrl.errors import EffectError
from jax_ragrl.rollout.effects import Effect
from jax_ragrl.rollout.system import State
from jax_ragrl.rollout.tree import NO_PARENT, Action, Call
from jax_ragrl.types import Hits, Question

# The reply to one effect: `Generate`, `CallLLM`, `Search`, a search that failed, `Done`.
EffectReply = Sequence[Action] | Sequence[str | EffectError] | Hits | EffectError | None


class Part(NamedTuple):
    """A rollout, or the subtrees of it that one of several processes makes.

    Below the root every child of every state gets a number, until there are as many states as
    processes, or a state has one child alone. All processes make the states above; each continues
    with the states whose number is that of the process, modulo the number of processes.

    Fields:
      number: the number of the rollout, of several of one question.
      process: the number of the process, among those that share the rollout.
      processes: how many processes share it.
      state: the number of a state.
      states: the number of states that were numbered with it; `processes` or more below a state
        that belongs to a process.
    """

    number: int = 0
    process: int = 0
    processes: int = 1
    state: int = 0
    states: int = 1

    def child(self, i: int, children: int) -> Part | None:
        """Returns the part that the i-th of some children belongs to; None: another process's."""
        if self.states >= self.processes:
            return self
        child = self._replace(state=self.state + self.states * i, states=self.states * children)
        if children > 1 and child.states < self.processes:
            return child
        is_own = child.state % self.processes == self.process
        return child._replace(states=self.processes) if is_own else None


class Branch(NamedTuple):
    """A live state of one question.

    Fields:
      state: the state of the system.
      question: the index of the question.
      parent: the node that led to the state.
      path: the indices of the siblings chosen from the root to the state.
      nodes: the actions from the root to the state.
      calls: the calls to the environment on the way.
      is_followed: whether the rollout continues after the pending search (see `Branching.peek`).
      place: its number at the root, then for each round its number among the branches that follow
        the same branch. The nodes of a round are in the order of the places.
      part: the part of a rollout that the branch belongs to.
    """

    state: State
    question: int
    parent: int = NO_PARENT
    path: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()
    is_followed: bool = True
    place: tuple[int, ...] = ()
    part: Part = Part()

    @property
    def round(self) -> int:
        """The number of rounds before this one."""
        return len(self.place) - 1

    def seed(self, run: int, question: Question, slot: int = 0) -> int:
        """Returns a 32-bit seed of the state, which no other question in the batch can change.

        Args:
          run: the seed of the rollout.
          question: the question of the branch.
          slot: the index of the effect among the effects of the state.
        """
        # Resumed runs must draw the same numbers, so this tuple never changes its form.
        name = (run, question.id, self.path) + ((slot,) if slot else ())
        return zlib.crc32(repr(name).encode())


class PendingEffect(NamedTuple):
    """One effect of one live branch; `slot` is its index among the effects of the state."""

    branch: Branch
    slot: int
    effect: Effect


# Performs effects of one kind; returns a reply per effect.
BatchedCall = Callable[[Sequence[PendingEffect]], Sequence[EffectReply]]
