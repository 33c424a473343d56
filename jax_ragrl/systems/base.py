"""Recipes: a system with its rewards, credit and exploration, and wrappers of systems."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Effect
from jax_ragrl.rollout.expand import Expander, once
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.tree import NO_PARENT, Forest, Record
from jax_ragrl.types import Hits, Question

Reply = Parsed | Hits | str
Credit = Callable[[Forest, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """Another system, but for what a subclass changes."""

    system: System

    @property
    def style(self) -> str:
        """The system's."""
        return self.system.style

    @property
    def top_k(self) -> int:
        """The system's."""
        return self.system.top_k

    @property
    def roles(self) -> Mapping[str, Role]:
        """The system's."""
        return self.system.roles

    def start(self, question: Question) -> Any:
        """The system's."""
        return self.system.start(question)

    def wants(self, state: Any) -> Effect | tuple[Effect, ...]:
        """The system's."""
        return self.system.wants(state)

    def advance(self, state: Any, reply: Any) -> Any:
        """The system's."""
        return self.system.advance(state, reply)


def nodes_to(forest: Forest, node: int) -> list[int]:
    """The numbers of the nodes from a node's root down to the node itself."""
    path = []
    while node != NO_PARENT:
        path.append(node)
        node = int(forest.parent_N[node])
    return path[::-1]


def path_to(forest: Forest, node: int) -> list[Record]:
    """The records of `nodes_to`."""
    return [forest.records[n] for n in nodes_to(forest, node)]


def everywhere_once(roles: frozenset[str]) -> Expander:
    """One sampled action everywhere, whatever is trained."""
    del roles
    return once


def two_or_more(key: str, count: int) -> None:
    """`UserError` where a group is too small for a comparison: nothing would be learnt."""
    if count < 2:
        raise UserError(
            f"recipe has {key} {count}, and one alone is compared with itself: use 2 or more"
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A paper as a table of choices over the shared parts.

    Fields:
      system: the state machine that is rolled out.
      reward: what each node of a forest earned itself, float32 `[N]`: the answer's reward on
        leaves, a role's own terms on its actions.
      credit: from a forest and those rewards, what the update learns from, float32 `[N]`, and a
        weight that is positive on nodes to train; the paper's. A return, which a critic's GAE
        spreads over an action's tokens, unless there are `advantages`.
      advantages: the credits that the objective may choose from, by their name in
        `Objective.advantage`: for a group rule an advantage, for GAE a return. None: `credit`, and
        GAE alone.
      turns: the credit of GAE over conversations (`Objective.span`): what each turn earned itself.
        None: no turn of this system continues another.
      terms: where the reward of a leaf is a sum, its terms by name, `[N]`: for a run's metrics.
      expander: from the roles in training, which actions a state tries.
      rollouts: whole copies of every question's rollout.
      inference: the system as it is evaluated, where that differs.
      metric: the headline metric of its evaluation, a name in `evaluate.METRICS`; a module may add
        one of its own there.
      judged: whether a judge's verdict may take the place of the metric in `reward`.
      width: how many actions at most the expander has sampled after one prompt, for plans.
    """

    system: System
    reward: Callable[[Forest], np.ndarray]
    credit: Credit
    expander: Callable[[frozenset[str]], Expander] = everywhere_once
    rollouts: int = 1
    inference: System | None = None
    metric: str = "f1"
    judged: bool = False
    width: int = 1
    advantages: Mapping[str, Credit] = dataclasses.field(default_factory=dict)
    turns: Credit | None = None
    terms: Callable[[Forest], Mapping[str, np.ndarray]] | None = None

    @property
    def evaluated(self) -> System:
        """The system as it is evaluated."""
        return self.inference or self.system
