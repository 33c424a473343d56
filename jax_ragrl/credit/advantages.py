"""Advantages: rewards compared with the expected reward.

The statistics of a group read only its *counted* nodes, and the result applies to all of its nodes.
So a rollout has the same weight whatever its number of nodes. CoDA counts planners: an executor
gets the advantage of its planner, and the number of executors does not change the baseline.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def whiten(x: Array, mask: Array) -> Array:
    """Scales `x`, of any shape, to mean 0 and standard deviation 1 over `mask`; 0 elsewhere."""
    count = jnp.maximum(jnp.sum(mask, dtype=x.dtype), 1)
    mean = jnp.sum(x, where=mask) / count
    variance = jnp.sum(jnp.square(x - mean), where=mask) / count
    return jnp.where(mask, (x - mean) / jnp.sqrt(variance + 1e-8), 0.0)


def group_centred(reward_N: Array, group_N: Array, counted_N: Array, num_groups: int) -> Array:
    """Subtracts the mean of its group from each node's reward, float32 `[N]`.

      A(n) = R(n) - mean of R over the group's counted nodes

    OPERA (MAPGRPO), eq. 2. Without a division, the advantages of a group keep the scale of its
    rewards. A group with fewer than two counted nodes has nothing to compare: its advantages are 0.

    Args:
      reward_N: float32, the reward of each node; any value, nan included, at nodes without a group.
      group_N: int32 group numbers below `num_groups`. A node with any other number, such as -1 for
        padding, is in no group and has advantage 0.
      counted_N: bool, the nodes that the statistics read.
      num_groups: the number of groups; static under `jit`.
    """
    return _compare(reward_N, group_N, counted_N, num_groups).centred_N


def group_normalised(reward_N: Array, group_N: Array, counted_N: Array, num_groups: int) -> Array:
    """Divides `group_centred` by the unbiased standard deviation of the group, float32 `[N]`.

      A(n) = (R(n) - mean) / (std + 1e-6)

    Shao et al. 2024 (GRPO), with CoDA's counted nodes and constants. Two departures from CoDA's
    code: a group of one has advantage 0, not its raw reward (mean 0, deviation 1); and equal
    rewards give exactly 0, not a rounding error divided by 1e-6.

    Args:
      reward_N, group_N, counted_N, num_groups: as in `group_centred`.
    """
    centred_N, variance_N, _ = _compare(reward_N, group_N, counted_N, num_groups)
    return centred_N / (jnp.sqrt(variance_N) + 1e-6)


def leave_one_out(reward_N: Array, group_N: Array, counted_N: Array, num_groups: int) -> Array:
    """Subtracts from each reward the mean of the *other* counted nodes, float32 `[N]`.

      A(i) = R(i) - mean of R(j) over j != i = (R(i) - mean of R) n / (n - 1)

    Ahmadian et al. 2024 (RLOO). The second form also applies to nodes that are not counted: a node
    with the reward of its planner gets the advantage of its planner.

    Args:
      reward_N, group_N, counted_N, num_groups: as in `group_centred`.
    """
    centred_N, _, count_N = _compare(reward_N, group_N, counted_N, num_groups)
    return centred_N * count_N / jnp.maximum(count_N - 1, 1)


def tree_group(
    reward_N: Array,
    question_N: Array,
    tree_N: Array,
    counted_N: Array,
    num_questions: int,
    num_trees: int,
) -> Array:
    """Averages two normalised advantages, within the question and within the tree, float32 `[N]`.

    Ji et al. 2025 (Tree-GRPO): several trees grow from one question, and the leaves of one tree
    share their first actions.

    Args:
      reward_N: float32, the reward of each node.
      question_N: int32, the question of each node.
      tree_N: int32, the tree of each node, numbered as by `Forest.roots`.
      counted_N: bool, the nodes that the statistics read.
      num_questions, num_trees: bounds of the numbers; static under `jit`.
    """
    among = group_normalised(reward_N, question_N, counted_N, num_questions)
    within = group_normalised(reward_N, tree_N, counted_N, num_trees)
    return (among + within) / 2


class _Compared(NamedTuple):
    """Per node, float32 `[N]`: its reward minus the mean, and variance and count of its group."""

    centred_N: Array
    variance_N: Array
    count_N: Array


def _compare(reward_N: Array, group_N: Array, counted_N: Array, num_groups: int) -> _Compared:
    grouped_N = (group_N >= 0) & (group_N < num_groups)
    # Out-of-range numbers would be clamped by the gathers below, so they become a valid index.
    own_N = jnp.where(grouped_N, group_N, 0)
    counted_N = counted_N & grouped_N

    def total(x_N: Array) -> Array:
        return jax.ops.segment_sum(jnp.where(counted_N, x_N, 0.0), own_N, num_groups)[own_N]

    count_N = total(jnp.ones_like(reward_N))
    # Subtract the lowest reward of the group first: equal rewards then give exactly zero.
    floor_Z = jax.ops.segment_min(jnp.where(counted_N, reward_N, jnp.inf), own_N, num_groups)
    above_N = jnp.where(grouped_N & (count_N > 1), reward_N - floor_Z[own_N], 0.0)
    mean_N = total(above_N) / jnp.maximum(count_N, 1)
    centred_N = jnp.where(grouped_N, above_N - mean_N, 0.0)
    # Unbiased: GRPO divides by n - 1.
    variance_N = total(jnp.square(centred_N)) / jnp.maximum(count_N - 1, 1)
    return _Compared(centred_N, variance_N, count_N)
