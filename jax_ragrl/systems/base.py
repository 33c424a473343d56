"""Recipes, which combine a system with its rewards, credit and exploration; wrappers of systems."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Expander, Growth, single_chain
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Steps, System
from jax_ragrl.rollout.tree import NO_PARENT, Forest
from jax_ragrl.types import Question

# From a forest and its rewards (float32 [N]) to a credit and a weight per node, both float32 [N].
Credit = Callable[[Forest, np.ndarray], tuple[np.ndarray, np.ndarray]]
# The same by a group rule, which is the argument `rule`, see `credit.advantages`.
GroupCredit = Callable[..., tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class WrappedSystem:
    """A system that delegates to another one; subclasses override some of the methods."""

    system: System

    @property
    def style(self) -> str:
        return self.system.style

    @property
    def top_k(self) -> int:
        return self.system.top_k

    @property
    def roles(self) -> Mapping[str, Role]:
        return self.system.roles

    def steps(self, question: Question) -> Steps:
        return self.system.steps(question)


def with_actions(steps: Steps, write: Callable[[Generate], ParsedAction | None]) -> Steps:
    """Yields the effects of a system except the actions that are written in place of a policy.

    `write` returns the action, or None to leave it to the policy. Of concurrent actions it writes
    all or none.
    """
    value = next(steps)
    while True:
        effects = (value,) if isinstance(value, Generate) else value
        actions = tuple(write(e) if isinstance(e, Generate) else None for e in effects)
        if not actions or None in actions:
            value = steps.send((yield value))
        else:
            # A lone reply comes without a tuple around it.
            value = steps.send(actions if len(actions) > 1 else actions[0])


def innermost_system(system: System) -> System:
    """Returns the innermost system, which is the instance of a paper's class."""
    while isinstance(system, WrappedSystem):
        system = system.system
    return system


def path_from_root(forest: Forest, node: int) -> list[int]:
    """Returns the node numbers from the root of `node` down to `node` itself."""
    path = []
    while node != NO_PARENT:
        path.append(node)
        node = int(forest.parent_N[node])
    return path[::-1]


def checked_credit(where: str, found: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a credit rule returned for the `count` nodes of a forest; `where` names it.

    `UserError` unless it is a credit and a weight per node: real numbers, the weights finite and
    not negative, the credit finite where the weight is positive.
    """
    if not (
        isinstance(found, tuple)
        and [getattr(x, "shape", None) for x in found] == [(count,), (count,)]
        and all(jnp.isdtype(x.dtype, ("bool", "integral", "real floating")) for x in found)
        and np.all(np.isfinite(found[1]) & (found[1] >= 0))
        and np.isfinite(found[0][found[1] > 0]).all()
    ):
        raise UserError(
            f"{where} returned {found!r:.200}: return a tuple of two arrays with one number for "
            f"each of the {count} nodes of the forest: the credit, finite where the weight is "
            "positive, and the weight, positive at the nodes to train and 0 elsewhere"
        )
    return found[0], found[1]


def masked_credit(
    credit: Credit, trainable: Callable[[Forest], np.ndarray], forest: Forest, reward_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Applies a credit rule, with weight 0 at the nodes that are not `Recipe.trainable`."""
    found = credit(forest, reward_N)
    credit_N, weight_N = checked_credit("config.credit", found, len(forest.records))
    return credit_N, np.where(trainable(forest), weight_N, np.float32(0))


def check_group_size(key: str, count: int) -> None:
    """Raises `UserError` if the recipe key `key` has a group size below 2: nothing to compare."""
    if count < 2:
        raise UserError(
            f"recipe has {key} {count}, but a group of one has no other member to be compared "
            "with: use 2 or more"
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A paper as a table of choices over the shared parts.

    Fields:
      reward: from a forest to the immediate reward of each node, float32 `[N]`: the reward of the
        answer on leaves, the terms of a role on its actions.
      credit: from a forest and its rewards to the return per node, float32 `[N]`, which the GAE of
        a critic spreads over the tokens of an action, and a weight per node, positive on the nodes
        to train. None if this system is not for a critic.
      compare: the same with advantages in place of returns, by a group rule
        (`credit.assign.over_rollouts`, ...). None if this system compares nothing.
      turn_credit: the credit for GAE over conversations (`Objective.span`): the immediate reward of
        each turn. None if no turn of this system continues another one.
      reward_terms: the summands of a leaf's reward by name, each `[N]`, for the metrics of a run.
      fixed_strategies: the systems that take one strategy for every question, by its name: the
        baselines of a policy that learns when to take it.
      expander: from the roles in training to the actions that are tried in a state.
      rollouts: the number of independent rollouts per question.
      inference: the system for evaluation, if it differs from `system`.
      metric: the headline metric of the evaluation, a key of `text.metrics.METRICS`.
      accepts_judge: whether the verdict of a judge may replace the metric in `reward`.
      trainable: from a forest to the nodes that may be trained, bool `[N]`, whatever the credit;
        None: all.
      growth: further actions in decisions of rollouts that have ended; None: none.
      width: the most actions that the expander samples per prompt; it sizes batches.
      reads_leaves: whether the credit depends on the rewards of leaves.
      priced: whether actions pay prices, which are small beside the reward of the answer.
      files: the files that the training reads, whose content is part of a run.
    """

    system: System
    reward: Callable[[Forest], np.ndarray]
    credit: Credit | None = None
    compare: GroupCredit | None = None
    expander: Callable[[frozenset[str]], Expander] = lambda roles: single_chain
    growth: Growth | None = None
    rollouts: int = 1
    inference: System | None = None
    metric: str = "f1"
    accepts_judge: bool = False
    width: int = 1
    turn_credit: Credit | None = None
    reward_terms: Callable[[Forest], Mapping[str, np.ndarray]] | None = None
    fixed_strategies: Mapping[str, System] = dataclasses.field(default_factory=dict)
    trainable: Callable[[Forest], np.ndarray] | None = None
    reads_leaves: bool = True
    priced: bool = False
    files: tuple[str, ...] = ()

    @property
    def evaluation_system(self) -> System:
        return self.inference or self.system


@dataclasses.dataclass(frozen=True)
class ChangedRoles(WrappedSystem):
    """A system in which `change` is applied to each role."""

    change: Callable[[Role], Role]

    @property
    def roles(self) -> Mapping[str, Role]:
        return {name: self.change(role) for name, role in self.system.roles.items()}


def with_roles(recipe: Recipe, change: Callable[[Role], Role]) -> Recipe:
    """Returns the recipe with other roles in each of its systems, fixed strategies included."""
    inference = recipe.inference
    return dataclasses.replace(
        recipe,
        system=ChangedRoles(recipe.system, change),
        inference=ChangedRoles(inference, change) if inference else None,
        fixed_strategies={
            name: ChangedRoles(system, change) for name, system in recipe.fixed_strategies.items()
        },
    )
