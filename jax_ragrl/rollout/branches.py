"""Branches of a rollout in progress, and the effects that they wait for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_ragrl.errors import EffectError
from jax_ragrl.rollout.effects import Effect
from jax_ragrl.rollout.system import Execution
from jax_ragrl.rollout.tree import NO_PARENT, Action, Call
from jax_ragrl.types import Hits, Question

# The reply to one effect: `Generate`, `CallLLM`, `Search`, a search that failed, `Done`.
EffectReply = Sequence[Action] | Sequence[str | EffectError] | Hits | EffectError | None


class Branch(NamedTuple):
    """A live branch of the rollouts of one question.

    Fields:
      execution: the system, suspended at the effects of the branch.
      question: the index of the question.
      parent: the latest action.
      path: the indices of the siblings chosen from the root to the branch.
      nodes: the actions from the root to the branch.
      calls: the calls to the environment on the way.
      is_followed: whether the rollout continues after the pending search (see `Branching.peek`).
      place: its number at the root, then for each round its number among the branches that follow
        the same branch. The nodes of a round are in the order of the places.
    """

    execution: Execution
    question: int
    parent: int = NO_PARENT
    path: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()
    is_followed: bool = True
    place: tuple[int, ...] = ()

    @property
    def round(self) -> int:
        """The number of rounds before this one."""
        return len(self.place) - 1

    def seed(self, run: int, question: Question, slot: int = 0) -> int:
        """Returns a 32-bit seed of the branch, which no other question in the batch can change.

        Args:
          run: the seed of the rollout.
          question: the question of the branch.
          slot: the index of the effect among the effects of the branch.
        """
        # Resumed runs must draw the same numbers, so this tuple never changes its form.
        name = (run, question.id, self.path) + ((slot,) if slot else ())
        return zlib.crc32(repr(name).encode())


class PendingEffect(NamedTuple):
    """One effect of one live branch; `slot` is its index among the effects of the branch."""

    branch: Branch
    slot: int
    effect: Effect


# Performs effects of one kind; returns a reply per effect.
BatchedCall = Callable[[Sequence[PendingEffect]], Sequence[EffectReply]]
