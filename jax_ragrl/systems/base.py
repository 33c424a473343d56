"""The shape of a system: a pure state machine over effects, and the recipe that trains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from jax_ragrl.rollout.effects import Effect
from jax_ragrl.rollout.expand import Expander, once
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.rollout.tree import NO_PARENT, Forest, Record
from jax_ragrl.types import Hits, Question

Reply = Parsed | Hits | str
RETURNS = "returns"


class System(Protocol):
    """A system of language-model agents. States are values: a branch is a copy.

    `wants` says what a state waits for, one effect or several at once: `Done` alone ends it.
    `advance` takes the reply (a `Parsed` to `Generate`, `Hits` to `Search`, a string to `Ask`; a
    tuple of them, in order, to several) and must be pure. `style` names the prompts, `top_k` is
    how many passages a search returns.
    """

    @property
    def style(self) -> str: ...

    @property
    def top_k(self) -> int: ...

    @property
    def roles(self) -> Mapping[str, Role]: ...

    def start(self, question: Question) -> Any: ...

    def wants(self, state: Any) -> Effect | tuple[Effect, ...]: ...

    def advance(self, state: Any, reply: Any) -> Any: ...


def path_to(forest: Forest, node: int) -> list[Record]:
    """The records from a node's root down to the node itself."""
    path = []
    while node != NO_PARENT:
        path.append(forest.records[node])
        node = int(forest.parent_N[node])
    return path[::-1]


def everywhere_once(roles: frozenset[str]) -> Expander:
    """One sampled action everywhere, whatever is trained."""
    del roles
    return once


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A paper as a table of choices over the shared parts.

    Fields:
      system: the state machine that is rolled out.
      reward: what each node of a forest earned itself, float32 `[N]`: the answer's reward on
        leaves, a role's own terms on its actions.
      credit: from a forest and those rewards, what the update learns from, float32 `[N]` (a return
        or an advantage, as the objective says), and a weight that is positive on nodes to train.
      expander: from the roles in training, which actions a state tries.
      rollouts: whole copies of every question's rollout.
      inference: the system as it is evaluated, where that differs.
      metric: the headline metric of its evaluation, see `evaluate.METRICS`.
      width: how many actions at most the expander has sampled after one prompt, for plans.
      gives: what `credit` makes, which the objective has to ask for: `returns` that a critic is
        learned from, or the name of the group rule that made advantages.
    """

    system: System
    reward: Callable[[Forest], np.ndarray]
    credit: Callable[[Forest, np.ndarray], tuple[np.ndarray, np.ndarray]]
    expander: Callable[[frozenset[str]], Expander] = everywhere_once
    rollouts: int = 1
    inference: System | None = None
    metric: str = "f1"
    width: int = 1
    gives: str = RETURNS

    @property
    def evaluated(self) -> System:
        """The system as it is evaluated."""
        return self.inference or self.system
