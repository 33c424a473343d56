"""Tree-GRPO: one search agent whose rollouts share prefixes and are compared in two groups.

Ji et al. 2025, "Tree Search for LLM Agent Reinforcement Learning". Several trees grow from a
question. The advantage of a rollout is the mean of two: against its tree and against its question.

Departures from the paper and its code
  1. Trees do not grow in rounds from a fixed number of random nodes. Each turn after the first
     has `width` successors with `branching_probability`, decided by the turn's own context. The
     first turn of a tree is its root.
  2. Turns that several rollouts share are trained once, with the mean of their advantages; the code
     trains them once per rollout.
  3. The reward is that of one of the agents in `executor.KINDS`.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from jax_ragrl.config.ranges import Count, Natural, Share
from jax_ragrl.credit.assign import Rule, compare, reachable_leaves
from jax_ragrl.rollout.effects import Generate, ModelOutput
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.base import Recipe, check_group_size
from jax_ragrl.systems.baselines import executor


@dataclasses.dataclass(frozen=True)
class RandomTree:
    """An expander that branches at random turns after the first one.

    The draw is a function of the turn's context, so that a rollout can be repeated.

    Fields:
      width: actions at a turn that branches; other turns have one.
      branching_probability: the probability that a turn branches.
      branching_depth: the last turn that may branch, counted from 1.
    """

    width: Count = 2
    branching_probability: Share = 0.5
    branching_depth: Natural = 4

    def __call__(self, effect: Generate, question: str) -> Branching:
        inner = 1 < effect.depth <= self.branching_depth
        draw = random.Random(_context_key(effect, question)).random() if inner else 1.0
        return Branching(self.width if draw < self.branching_probability else 1)


def _context_key(effect: Generate, question: str) -> str:
    # The labels are part of the seed. They are spelled out here, and not the names of the classes,
    # so that a renamed class does not change the draws of a run that is resumed.
    segments = [
        f"Said(ids={s.ids!r})" if isinstance(s, ModelOutput) else f"Told(text={s.text!r})"
        for s in effect.history
    ]
    comma = "," if len(segments) == 1 else ""
    return f"{question}\n({', '.join(segments)}{comma})"


def leaf_advantages(
    forest: Forest, reward_N: np.ndarray, rule: Rule
) -> tuple[np.ndarray, np.ndarray]:
    """Returns per turn the mean advantage of the rollouts through it, and their number.

    By the rule of the paper, `group_normalised`:

    A(l) = ((R(l) - mean_tree R) / std_tree R + (R(l) - mean_question R) / std_question R) / 2
    """
    leaves = np.flatnonzero(forest.leaf_N)
    among_L = compare(rule, reward_N[leaves], forest.question_N[leaves])
    within_L = compare(rule, reward_N[leaves], forest.roots()[leaves])
    advantage_N = np.zeros(len(forest.records), np.float32)
    advantage_N[leaves] = (among_L + within_L) / 2
    return reachable_leaves(forest, advantage_N)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`: the agent, how trees branch, and the trees per question."""

    system: executor.SearchAgent = executor.SearchAgent("search_r1", max_turns=3)
    tree: RandomTree = RandomTree()
    rollouts: Count = 4

    def __post_init__(self) -> None:
        check_group_size("rollouts", self.rollouts)


def recipe(settings: Settings) -> Recipe:
    """Returns the recipe of the agent with trees instead of single rollouts."""
    agent = executor.recipe(executor.Settings(settings.system, settings.rollouts))
    tree = settings.tree
    return dataclasses.replace(
        agent, credit=None, compare=leaf_advantages, expander=lambda roles: tree, width=tree.width
    )
