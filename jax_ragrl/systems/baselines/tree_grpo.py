"""Tree-GRPO: one search agent whose rollouts share prefixes and are compared in two groups.

Ji et al. 2025, "Tree Search for LLM Agent Reinforcement Learning". Several trees grow from a
question: each begins with one rollout, and in each round gets actions in random states of it, with
a rollout after each. The advantage of a rollout is the sum of two: in its tree and its question.

Departures from the paper and its code
  1. Turns that several rollouts share are trained once, with the mean of their advantages; the code
     trains them once per rollout.
  2. An action that is drawn twice in a state is one node, so that its rollout counts once.
  3. All rollouts of a tree are kept. The code can keep fewer than it samples.
  4. The reward is that of one of the agents in `executor.KINDS`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_ragrl.config.ranges import Count, Natural
from jax_ragrl.credit.assign import Rule, compare, reachable_leaves
from jax_ragrl.rollout.expand import Growth
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.base import Recipe, check_group_size
from jax_ragrl.systems.baselines import executor


def leaf_advantages(
    forest: Forest, reward_N: np.ndarray, rule: Rule
) -> tuple[np.ndarray, np.ndarray]:
    """Returns per turn the mean advantage of the rollouts through it, and their number.

    By the rule of the paper, `group_normalised`:

    A(l) = (R(l) - mean_tree R) / std_tree R + (R(l) - mean_question R) / std_question R
    """
    leaves = np.flatnonzero(forest.leaf_N)
    among_L = compare(rule, reward_N[leaves], forest.question_N[leaves])
    # A tree may have several first turns. Its number begins the paths of its nodes.
    records = [forest.records[leaf] for leaf in leaves]
    trees = [(r.question, r.path[r.path[0] < 0]) for r in records]
    tree_L = np.unique(trees, axis=0, return_inverse=True)[1]
    within_L = compare(rule, reward_N[leaves], tree_L.reshape(-1))
    advantage_N = np.zeros(len(forest.records), np.float32)
    advantage_N[leaves] = among_L + within_L
    return reachable_leaves(forest, advantage_N)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`. The defaults are the paper's.

    Fields:
      rollouts: the trees per question (M).
      rounds: how many times a tree grows (L).
      actions: the actions that a tree gets in a round (N).
    """

    system: executor.SearchAgent = executor.SearchAgent("search_r1", max_turns=3)
    rollouts: Count = 2
    rounds: Natural = 1
    actions: Natural = 2

    def __post_init__(self) -> None:
        check_group_size("rollouts", self.rollouts)


def recipe(settings: Settings) -> Recipe:
    """Returns the recipe of the agent with trees instead of single rollouts."""
    agent = executor.recipe(executor.Settings(settings.system, settings.rollouts))
    growth = Growth(settings.rounds, settings.actions)
    return dataclasses.replace(agent, credit=None, compare=leaf_advantages, growth=growth)
