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
    """The mean reward of the leaves below each node, and their number (C-3PO, eq. 5).

    Dead leaves count with their reward, or not at all; `multiplicity` counts a merged sibling as
    often as it was sampled.
    """
    counted_N = forest.leaf_N & ~(forest.dead_N & ignore_dead)
    weight_N = forest.multiplicity_N if multiplicity else np.ones_like(forest.parent_N)
    arrays = (forest.parent_N, counted_N, reward_N, weight_N.astype(np.float32))
    count = len(forest.parent_N)
    # Few compiled shapes: padding nodes are roots and no leaves. A forest may be empty.
    size = max(1, -(-count // 512)) * 512
    fills: tuple[Any, ...] = (-1, False, 0.0, 0.0)
    padded = [
        np.pad(x, (0, size - count), constant_values=fill)
        for x, fill in zip(arrays, fills, strict=True)
    ]
    value_N, leaves_N = jax.device_get(_monte_carlo(*jax.device_put(padded)))
    return value_N[:count], leaves_N[:count]


def shared(forest: Forest, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The reward of a rollout's leaf to each of its actions, added to what the action earned.

    For rollouts that do not branch: one leaf each.
    """
    root_N = forest.roots()
    leaf_N = np.zeros(len(root_N), np.float32)
    np.add.at(leaf_N, root_N[forest.leaf_N], reward_N[forest.leaf_N])
    own_N = np.where(forest.leaf_N, 0, reward_N)
    return (leaf_N[root_N] + own_N).astype(np.float32), np.ones(len(root_N), np.float32)


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
    """A rollout's reward against the other rollouts of its question, to each of its actions.

    One number a rollout enters the statistics, so the number of its actions cannot weigh (CoDA,
    section 3.4). `rule` is one of `credit.advantages`: `group_normalised`, `leave_one_out`, ...
    """
    root_N = forest.roots()
    roots, member_N = np.unique(root_N, return_inverse=True)
    if np.bincount(member_N[forest.leaf_N], minlength=1).max() > 1:
        raise UserError(
            "rollouts that branch have several rewards, and cannot be compared as whole ones: use "
            "over_siblings (config.credit=siblings)"
        )
    total_R = np.zeros(len(roots), np.float32)
    np.add.at(total_R, member_N[forest.leaf_N], reward_N[forest.leaf_N])
    missing = -len(roots) % 64  # few compiled shapes: padding is in no group
    reward_R = np.pad(total_R, (0, missing))
    group_R = np.pad(forest.question_N[roots], (0, missing), constant_values=-1)
    arrays = jax.device_put((reward_R, group_R, group_R >= 0))
    advantage_R = jax.device_get(_compared(rule, *arrays, len(forest.questions)))
    return advantage_R[member_N], np.ones(len(root_N), np.float32)


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
    size = max(1, -(-len(value_N) // 512)) * 512  # few compiled shapes: padding is in no group
    missing = (0, size - len(value_N))
    padded_N = np.pad(group_N, missing, constant_values=-1)
    arrays = jax.device_put((np.pad(value_N, missing), padded_N, padded_N >= 0))
    advantage_N = jax.device_get(_compared(rule, *arrays, size))[: len(value_N)]
    return advantage_N, (group_N >= 0).astype(np.float32)


_compared = jax.jit(lambda rule, *arrays: rule(*arrays), static_argnums=(0, 4))
