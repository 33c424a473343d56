"""Tree-GRPO: one searching agent, whose rollouts share beginnings and are compared twice.

Ji et al. 2025, "Tree Search for LLM Agent Reinforcement Learning". Several trees grow from a
question; a rollout's advantage is the mean of two, against its tree and against its question.

Departures from the paper and its code
  1. A tree is not grown in rounds of so many random nodes: each turn after the first goes on twice
     (`width` times) with the chance `share`, decided by the turn's own context. The first turn of a
     tree is its root.
  2. A turn that several rollouts share is trained once, with the mean of their advantages; the code
     trains it once a rollout.
  3. The reward is that of one of the agents in `executor.KINDS`.
"""

from __future__ import annotations

import dataclasses
import random

import jax
import numpy as np

from jax_ragrl.credit.advantages import tree_group
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.baselines import executor


@dataclasses.dataclass(frozen=True)
class RandomTree:
    """`width` actions at a random `share` of the turns after the first, one action elsewhere.

    Only the first `until` turns branch. What is random is a function of the turn's context, so a
    rollout can be repeated.
    """

    width: int = 2
    share: float = 0.5
    until: int = 4

    def __call__(self, effect: Generate, question: str) -> Branching:
        inner = 1 < effect.depth <= self.until
        chance = random.Random(f"{question}\n{effect.after!r}").random() if inner else 1.0
        return Branching(self.width if chance < self.share else 1)


def leaf_advantages(forest: Forest, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """To each turn the mean advantage of the rollouts through it, and how many these are.

    A(l) = ((R(l) - mean_tree R) / std_tree R + (R(l) - mean_question R) / std_question R) / 2
    """
    leaves = np.flatnonzero(forest.leaf_N)
    _, tree_L = np.unique(forest.roots()[leaves], return_inverse=True)
    missing = -len(leaves) % 64  # few compiled shapes: padding is in no group
    fills = (0, -1, -1, False)
    rows = (reward_N[leaves], forest.question_N[leaves], tree_L.astype(np.int32), leaves >= 0)
    padded = [
        np.pad(row, (0, missing), constant_values=fill)
        for row, fill in zip(rows, fills, strict=True)
    ]
    counts = (len(forest.questions), len(padded[0]))
    advantage_N = np.zeros(len(forest.records), np.float32)
    advantage_N[leaves] = jax.device_get(_compared(*jax.device_put(padded), *counts))[: len(leaves)]
    return reachable_leaves(forest, advantage_N)


_compared = jax.jit(tree_group, static_argnums=(4, 5))


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`: the agent, whose `rollouts` are trees, and how they branch."""

    agent: executor.Settings = executor.Settings("search_r1", max_turns=3, rollouts=4)
    tree: RandomTree = RandomTree()

    def __post_init__(self) -> None:
        if self.agent.rollouts < 2:
            raise UserError(
                f"recipe.agent.rollouts is {self.agent.rollouts}: it is how many trees a question "
                "has, and one alone is compared with itself: use 2 or more"
            )


def recipe(settings: Settings) -> Recipe:
    """The agent's own recipe, with trees for rollouts."""
    made = executor.recipe(settings.agent)
    tree = settings.tree
    return dataclasses.replace(
        made,
        credit=leaf_advantages,
        gives="tree_group",
        expander=lambda roles: tree,
        width=tree.width,
    )
