"""Advantages: credit compared with what was expected.

A group is compared through its *counted* nodes only, and the result applies to all of its nodes, so
that a rollout weighs once however many nodes it wrote. CoDA counts planners: an executor gets the
advantage of its planner, and the number of executors moves nobody's baseline.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def whiten(x: Array, mask: Array) -> Array:
    """Zero mean and unit standard deviation over what `mask` keeps; 0 elsewhere. Any shape."""
    count = jnp.maximum(jnp.sum(mask, dtype=x.dtype), 1)
    mean = jnp.sum(x, where=mask) / count
    variance = jnp.sum(jnp.square(x - mean), where=mask) / count
    return jnp.where(mask, (x - mean) / jnp.sqrt(variance + 1e-8), 0.0)


def group_centred(reward_N: Array, group_N: Array, counted_N: Array, num_groups: int) -> Array:
    """Each node's reward minus the mean of its group, float32 `[N]`.

      A(n) = R(n) - mean of R over the group's counted nodes

    OPERA (MAPGRPO), eq. 2: no division, so a group's advantages are as large as its rewards differ.

    Args:
      reward_N: float32; what is neither counted nor in a group may hold anything.
      group_N: int32 below `num_groups`; a node outside of that, such as -1, is in no group: it has
        advantage 0 and padding is of this kind.
      counted_N: bool, the nodes that the statistics read.
      num_groups: static.

    A group with one counted node, or none, has nothing to compare: its advantages are 0.
    """
    return _compare(reward_N, group_N, counted_N, num_groups).centred_N


def group_normalised(reward_N: Array, group_N: Array, counted_N: Array, num_groups: int) -> Array:
    """`group_centred` divided by the group's unbiased standard deviation plus 1e-6, float32 `[N]`.

    Shao et al. 2024 (GRPO), with CoDA's counted nodes and constants. Two departures from CoDA's
    code: a group of one is 0, where the code keeps its raw reward (mean 0, deviation 1); and equal
    rewards give exactly 0, where rounding divided by 1e-6 does not.
    """
    centred_N, variance_N, _ = _compare(reward_N, group_N, counted_N, num_groups)
    return centred_N / (jnp.sqrt(variance_N) + 1e-6)


def leave_one_out(reward_N: Array, group_N: Array, counted_N: Array, num_groups: int) -> Array:
    """Each reward minus the mean of the *other* counted nodes of its group, float32 `[N]`.

      A(i) = R(i) - mean of R(j) over j != i = (R(i) - mean of R) n / (n - 1)

    Ahmadian et al. 2024 (RLOO). The second form is also that of nodes that are not counted: a node
    with its planner's reward gets its planner's advantage. Arguments as in `group_centred`.
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
    """The mean of two normalised advantages: within the question and within the tree.

    Ji et al. 2025 (Tree-GRPO): several trees grow from one question, and leaves of one tree share
    a beginning. `tree_N` numbers the trees, as `Forest.roots` does.
    """
    among = group_normalised(reward_N, question_N, counted_N, num_questions)
    within = group_normalised(reward_N, tree_N, counted_N, num_trees)
    return (among + within) / 2


class _Compared(NamedTuple):
    """Of each node's group, float32 `[N]`: the node against the mean, the variance, the count."""

    centred_N: Array
    variance_N: Array
    count_N: Array


def _compare(reward_N: Array, group_N: Array, counted_N: Array, num_groups: int) -> _Compared:
    grouped_N = (group_N >= 0) & (group_N < num_groups)
    own_N = jnp.where(grouped_N, group_N, 0)
    counted_N = counted_N & grouped_N

    def total(x_N: Array) -> Array:
        return jax.ops.segment_sum(jnp.where(counted_N, x_N, 0.0), own_N, num_groups)[own_N]

    count_N = total(jnp.ones_like(reward_N))
    # Rewards are compared from their group's lowest: a group of equal rewards is then exactly zero.
    floor_Z = jax.ops.segment_min(jnp.where(counted_N, reward_N, jnp.inf), own_N, num_groups)
    above_N = jnp.where(grouped_N & (count_N > 1), reward_N - floor_Z[own_N], 0.0)
    mean_N = total(above_N) / jnp.maximum(count_N, 1)
    centred_N = jnp.where(grouped_N, above_N - mean_N, 0.0)
    variance_N = total(jnp.square(centred_N)) / jnp.maximum(count_N - 1, 1)
    return _Compared(centred_N, variance_N, count_N)
