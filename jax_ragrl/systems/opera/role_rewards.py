"""The rewards of all nodes of a forest: each action by its role, each leaf by its answer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN
from jax_ragrl.systems.opera.rewards import (
    GoldOf,
    SubGoal,
    analysis_reward,
    plan_reward,
    plan_reward_code,
    rewrite_reward,
    steps_gold,
)
from jax_ragrl.systems.opera.world import world_gold
from jax_ragrl.text.metrics import exact_match
from jax_ragrl.types import Question

PLAN_REWARDS = {"paper": plan_reward, "code": plan_reward_code}
GOLD: Mapping[str, GoldOf] = {"steps": steps_gold, "world": world_gold}


def role_rewards(
    forest: Forest, gold: str, plan_reward: str, min_plan_steps: int, ndcg_power: float
) -> np.ndarray:
    """Returns each action's reward by its role, and exact match on leaves, float32 `[N]`.

    The success of a plan is the mean exact match of the rollouts that execute it.

    Args:
      forest: the rollouts.
      gold: the source of the gold of sub-goals, a key of `GOLD`.
      plan_reward: the scoring of plans, a key of `PLAN_REWARDS`.
      min_plan_steps: the number of steps below which a plan loses structure reward.
      ndcg_power: the exponent of the NDCG in the reward of a query.
    """
    reward_N = answer_rewards(forest, exact_match)
    # Read the mean over leaves first: the loop below overwrites the rewards of actions.
    success_N, _ = reachable_leaves(forest, reward_N)
    for node, record in enumerate(forest.records):
        # Leaves keep their exact match.
        if record.action is None:
            continue
        question = forest.questions[record.question]
        if record.role == PLAN:
            assert record.parsed is not None
            score, success = PLAN_REWARDS[plan_reward], float(success_N[node])
            reward_N[node] = score(question.text, record.parsed, success, min_plan_steps)
        else:
            reward_N[node] = _step_reward(question, record, GOLD[gold], ndcg_power)
    return reward_N


def _step_reward(question: Question, record: Record, gold_of: GoldOf, ndcg_power: float) -> float:
    """Returns the reward of an analysis or a rewritten query."""
    action, state = record.parsed, record.state
    assert action is not None
    # The sub-goal of the latest search.
    subgoal = state.latest(SubGoal)
    if record.role == ANALYSIS:
        return analysis_reward(action, gold_of(question, subgoal, state.candidates))
    return rewrite_reward(action, gold_of(question, subgoal, record.passages), ndcg_power)
