"""Credit rules on whole forests: from the rewards of nodes and leaves to one number per node.

Each rule takes the rollouts and the rewards of their nodes, float32 `[N]`. It returns a credit,
float32 `[N]`, and a weight, float32 `[N]`, which is positive at the nodes to train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jax_ragrl.credit.returns import mean_of_children, monte_carlo
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.tree import Forest, sibling_groups

# From the rewards of a group, `[K]`, to their advantages, see `credit.advantages`.
Rule = Callable[[np.ndarray], Any]

_monte_carlo, _mean_of_children = jax.jit(monte_carlo), jax.jit(mean_of_children)


def reachable_leaves(forest: Forest, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Monte Carlo credit: the mean return of the paths from each node to the leaves below it.

    A return is the sum of the rewards on the path, from the node itself to the leaf. In C-3PO only
    leaves have rewards (Chen et al. 2025, eq. 5). A leaf without an answer counts with its reward,
    and a merged sibling once. The weight is the number of leaves below a node; a node without any
    has credit 0.
    """
    return _on_forest(_monte_carlo, forest, reward_N, np.ones_like(forest.parent_N))


def child_mean(forest: Forest, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Monte Carlo credit: the reward of each node plus the mean over its children's values.

    Unlike `reachable_leaves` it is unbiased on trees whose nodes have different numbers of leaves
    below them. A merged action counts as often as it was sampled, so that a forced one does not
    change the values above it; where no sampled action has a leaf, forced ones count. A leaf
    without an answer counts with its reward. The weight is 1 at nodes with a leaf below, 0
    elsewhere.
    """
    _, leaves_N = reachable_leaves(forest, reward_N)
    sampled_N = (forest.multiplicity_N - forest.forced_N) * (leaves_N > 0)
    child_N = forest.parent_N + 1  # roots are the children of 0
    has_sample_N = np.bincount(child_N, sampled_N, len(child_N) + 1)[child_N] > 0
    weight_N = np.where(has_sample_N, sampled_N, forest.multiplicity_N)
    return _on_forest(_mean_of_children, forest, reward_N, weight_N)


def _on_forest(
    value: Callable[..., Any],
    forest: Forest,
    reward_N: np.ndarray,
    weight_N: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Applies a jitted function of `credit.returns` to a forest, padded to few shapes."""
    parent_N = pad_rows(forest.parent_N, 512, -1)  # padding nodes are roots and no leaves
    rest = [pad_rows(x, 512) for x in (forest.leaf_N, reward_N, weight_N.astype(np.float32))]
    value_N, leaves_N = jax.device_get(value(*jax.device_put([parent_N, *rest])))
    count = len(forest.parent_N)
    return value_N[:count], leaves_N[:count]


def pad_rows(x: np.ndarray, multiple: int, fill: int = 0) -> np.ndarray:
    """Pads the first axis to a positive multiple, so that jitted functions see few shapes."""
    missing = -len(x) % multiple if len(x) else multiple
    return np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)


def shared_credit(forest: Forest, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gives each action the reward of its rollout's leaf plus the action's own reward.

    Raises:
      UserError: a rollout has several leaves.
    """
    # Without branches, the root identifies the rollout.
    root_N = forest.roots()
    _check_unbranched(forest, root_N, "reachable_leaves")
    leaf_N = np.zeros(len(root_N), np.float32)
    np.add.at(leaf_N, root_N[forest.leaf_N], reward_N[forest.leaf_N])
    own_N = np.where(forest.leaf_N, 0, reward_N)  # a leaf's reward is in leaf_N already
    return (leaf_N[root_N] + own_N).astype(np.float32), np.ones(len(root_N), np.float32)


def _check_unbranched(forest: Forest, root_N: np.ndarray, alternative: str) -> None:
    if np.bincount(root_N[forest.leaf_N], minlength=1).max() > 1:
        raise UserError(
            "these rollouts branch, so a rollout has several rewards, but this credit needs one "
            f"reward per rollout: use config.credit={alternative}, or a recipe without branches"
        )


def immediate_credit(forest: Forest, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gives each action its own reward plus the mean reward of the leaves directly below it.

    These are the per-turn rewards of a conversation; GAE carries them back (`Objective.gae_span`).
    """
    own_N = np.where(forest.leaf_N, 0, reward_N).astype(np.float32)
    parents = forest.parent_N[forest.leaf_N]
    has_parent = parents >= 0  # a leaf that is a root has no action to reward
    leaf_rewards = reward_N[forest.leaf_N][has_parent]
    sum_N, count_N = np.zeros_like(own_N), np.zeros_like(own_N)
    np.add.at(sum_N, parents[has_parent], leaf_rewards)
    np.add.at(count_N, parents[has_parent], 1)
    return own_N + sum_N / np.maximum(count_N, 1), np.ones_like(own_N)


def over_rollouts(
    forest: Forest, reward_N: np.ndarray, rule: Rule
) -> tuple[np.ndarray, np.ndarray]:
    """Compares the return of each rollout with the other rollouts of its question.

    The return is the sum of the rewards of the leaf and of all actions on the path to it (in CoDA,
    only the leaf has one). Each rollout enters the statistics once, whatever its number of actions
    (CoDA, section 3.3.2). An action that leads to no leaf has weight 0.

    Raises:
      UserError: a rollout has several leaves.
    """
    root_N = forest.roots()
    _check_unbranched(forest, root_N, "siblings")
    return_N, leaves_N = reachable_leaves(forest, reward_N)
    # R counts rollouts; the return of a rollout is the return of its root.
    roots, member_N = np.unique(root_N, return_inverse=True)
    group_R = np.where(leaves_N[roots] > 0, forest.question_N[roots], -1)
    # One member per rollout: its number of actions must not weigh in the statistics.
    advantage_R = compare(rule, return_N[roots], group_R)
    return advantage_R[member_N], (leaves_N > 0).astype(np.float32)


def over_roles(forest: Forest, reward_N: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Compares the `shared_credit` of each action with the same role in the other rollouts.

    For unbranched rollouts (agent-wise normalization): all roles have the reward of the answer, and
    the penalty of a role is compared with the penalties of that role in the other rollouts of the
    question. A role that acts several times in a rollout counts with each of its actions.
    """
    credit_N, weight_N = shared_credit(forest, reward_N)
    names = sorted({record.role for record in forest.records})
    role_N = np.array([names.index(record.role) for record in forest.records], np.int32)
    # One group per pair of a question and a role.
    group_N = forest.question_N * len(names) + role_N
    return compare(rule, credit_N, group_N), weight_N


def over_siblings(
    forest: Forest, reward_N: np.ndarray, rule: Rule
) -> tuple[np.ndarray, np.ndarray]:
    """Compares the value of each action (`child_mean`) with those tried in its state.

    GRPO in a tree: a decision is a group, without actions that lead to no leaf. A forced action is
    a member too, and trained like one sample unless the policy sampled it as well.
    """
    value_N, has_leaf_N = child_mean(forest, reward_N)
    count_N = np.where(has_leaf_N > 0, forest.multiplicity_N, 0)
    trained_N = count_N - (forest.forced_N & (count_N > 1))
    return compare_draws(forest, value_N, rule, count_N, trained_N)


def compare_draws(
    forest: Forest, value_N: np.ndarray, rule: Rule, count_N: np.ndarray, trained_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compares the values of the actions of each decision, float32 `[N]`, as often as drawn.

    A node is `count_N` members of its group, `trained_N` of which are trained: its credit is their
    advantage times `trained_N`. So with `leave_one_out` the expected gradient of the samples is the
    policy gradient (C3, Chen et al. 2026). The weight is 1, or 0 if none is trained or compared.
    """
    credit_N, weight_N = np.zeros((2, len(value_N)), np.float32)
    for nodes in sibling_groups(forest):
        members = np.repeat(nodes, count_N[nodes])
        if len(members) > 1:
            credit_N[members] = rule(value_N[members])
            credit_N[nodes] *= trained_N[nodes]
            weight_N[nodes] = trained_N[nodes] > 0
    return credit_N, weight_N


def compare(rule: Rule, reward_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """Applies a rule to each group of members, float32 `[M]`; 0 in no group (-1) or if alone."""
    advantage_M = np.zeros(len(reward_M), np.float32)
    order = np.argsort(group_M, kind="stable")
    cuts = np.flatnonzero(np.diff(group_M[order])) + 1
    for members in np.split(order, cuts):
        if len(members) > 1 and group_M[members[0]] >= 0:
            advantage_M[members] = rule(reward_M[members])
    return advantage_M


# Credits that yield a return per action, for an objective with a critic.
RETURN_CREDITS: Mapping[str, Callable[..., Any]] = {
    "reachable_leaves": reachable_leaves,
    "child_mean": child_mean,
    "shared": shared_credit,
    "earned": immediate_credit,
}
# Credits that compare an action with a group, by the rule in `objective.advantage`.
GROUP_CREDITS: Mapping[str, Callable[..., Any]] = {
    "rollouts": over_rollouts,
    "roles": over_roles,
    "siblings": over_siblings,
}
