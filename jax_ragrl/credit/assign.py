"""Credit rules on a forest: from what nodes and leaves earned to one number a node.

Each returns float32 `[N]` credit and a float32 `[N]` weight that is positive on nodes to train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ragrl.credit.returns import monte_carlo
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.tree import Forest, decisions

_monte_carlo = jax.jit(monte_carlo)


def reachable_leaves(
    forest: Forest, reward_N: np.ndarray, *, ignore_dead: bool = False, multiplicity: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The mean return of the paths from each node to its leaves, and the number of these leaves.

    A return is the reward of the leaf and of each action on the path, the node's own included. In
    C-3PO only leaves have rewards (eq. 5). A node that leads to no leaf has credit 0 and weight 0.

    Args:
      forest: the rollouts.
      reward_N: float32, what leaves and actions earned themselves.
      ignore_dead: leave out dead leaves, which otherwise count with their reward.
      multiplicity: count a merged sibling as often as it was sampled.
    """
    counted_N = forest.leaf_N & ~(forest.dead_N & ignore_dead)
    weight_N = forest.multiplicity_N if multiplicity else np.ones_like(forest.parent_N)
    parent_N = padded(forest.parent_N, 512, -1)  # padding nodes are roots and no leaves
    rest = [padded(x, 512) for x in (counted_N, reward_N, weight_N.astype(np.float32))]
    value_N, leaves_N = jax.device_get(_monte_carlo(*jax.device_put([parent_N, *rest])))
    count = len(forest.parent_N)
    return value_N[:count], leaves_N[:count]


def padded(x: np.ndarray, multiple: int, fill: int = 0) -> np.ndarray:
    """As many rows as a multiple, at least one of it, so that few shapes are compiled."""
    missing = -len(x) % multiple if len(x) else multiple
    return np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)


def shared(forest: Forest, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The reward of a rollout's leaf to each of its actions, added to what the action earned.

    For rollouts that do not branch, one leaf each; `UserError` for others.
    """
    root_N = forest.roots()
    _check_lines(forest, root_N, "reachable_leaves")
    leaf_N = np.zeros(len(root_N), np.float32)
    np.add.at(leaf_N, root_N[forest.leaf_N], reward_N[forest.leaf_N])
    own_N = np.where(forest.leaf_N, 0, reward_N)
    return (leaf_N[root_N] + own_N).astype(np.float32), np.ones(len(root_N), np.float32)


def _check_lines(forest: Forest, root_N: np.ndarray, instead: str) -> None:
    """`UserError` where a rollout has several leaves: their rewards would be added up."""
    if np.bincount(root_N[forest.leaf_N], minlength=1).max() > 1:
        raise UserError(
            "these rollouts branch, so that one has several rewards, and this credit is for those "
            f"that do not: use config.credit={instead}, or a recipe of single rollouts"
        )


def earned(forest: Forest, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each action earned itself, and the mean reward of the leaves right after it.

    These are the rewards of a conversation's turns: GAE carries them back (`Objective.span`).
    """
    own_N = np.where(forest.leaf_N, 0, reward_N).astype(np.float32)
    ends = forest.parent_N[forest.leaf_N]
    leaves = reward_N[forest.leaf_N][ends >= 0]
    sum_N, count_N = np.zeros_like(own_N), np.zeros_like(own_N)
    np.add.at(sum_N, ends[ends >= 0], leaves)
    np.add.at(count_N, ends[ends >= 0], 1)
    return own_N + sum_N / np.maximum(count_N, 1), np.ones_like(own_N)


def over_rollouts(
    forest: Forest, reward_N: np.ndarray, rule: Callable[..., Any]
) -> tuple[np.ndarray, np.ndarray]:
    """A rollout's return against the other rollouts of its question, to each of its actions.

    The return is the reward of the leaf and of every action on the path to it (in CoDA, the leaf's
    alone). One number per rollout enters the statistics, so the number of its actions cannot weigh
    (CoDA, section 3.3.2). An action that was not carried out to a leaf has weight 0.

    Args:
      forest: rollouts of one leaf each; `UserError` for others.
      reward_N: float32, what leaves and actions earned themselves.
      rule: one of `credit.advantages`: `group_normalised`, `leave_one_out`, ...
    """
    root_N = forest.roots()
    _check_lines(forest, root_N, "siblings")
    return_N, leaves_N = reachable_leaves(forest, reward_N)
    roots, member_N = np.unique(root_N, return_inverse=True)
    group_R = np.where(leaves_N[roots] > 0, forest.question_N[roots], -1)
    advantage_R = _compared(rule, return_N[roots], group_R, len(forest.questions))
    return advantage_R[member_N], (leaves_N > 0).astype(np.float32)


def over_roles(
    forest: Forest, reward_N: np.ndarray, rule: Callable[..., Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Each action's `shared` credit against those of its role in the question's other rollouts.

    For lines, where a rollout acts once in each role: all roles earn the answer's reward, and what
    one pays for its own faults is compared with what that role paid elsewhere. `rule` as above.
    """
    credit_N, weight_N = shared(forest, reward_N)
    names = sorted({record.role for record in forest.records})
    role_N = np.array([names.index(record.role) for record in forest.records], np.int32)
    group_N = forest.question_N * len(names) + role_N
    return _compared(rule, credit_N, group_N, len(forest.questions) * len(names)), weight_N


def over_siblings(
    forest: Forest, reward_N: np.ndarray, rule: Callable[..., Any]
) -> tuple[np.ndarray, np.ndarray]:
    """What an action is worth (`reachable_leaves`) against the others that were tried in its state.

    GRPO in a tree: a decision is a group. A merged action counts once. One without siblings, or
    from which no leaf was reached, has weight 0: there is nothing to learn from it.
    """
    value_N, leaves_N = reachable_leaves(forest, reward_N)
    group_N = np.full(len(value_N), -1, np.int32)
    for number, nodes in enumerate(decisions(forest)):
        known = [node for node in nodes if leaves_N[node] > 0]
        group_N[known] = number if len(known) > 1 else -1
    advantage_N = _compared(rule, value_N, group_N, len(padded(value_N, 512)), 512)
    return advantage_N, (group_N >= 0).astype(np.float32)


def _compared(
    rule: Callable[..., Any],
    reward_M: np.ndarray,
    group_M: np.ndarray,
    groups: int,
    multiple: int = 64,
) -> np.ndarray:
    """A rule of `credit.advantages` on members of groups (-1: of none), float32 `[M]`.

    Members are padded to a multiple, so that few shapes are compiled. There are no groups where
    every question failed: one is compiled for all the same.
    """
    group_P = padded(group_M.astype(np.int32), multiple, -1)
    arrays = jax.device_put((padded(reward_M, multiple), group_P, group_P >= 0))
    return jax.device_get(_ruled(rule, *arrays, max(groups, 1)))[: len(reward_M)]


_ruled = jax.jit(lambda rule, *arrays: rule(*arrays), static_argnums=(0, 4))
