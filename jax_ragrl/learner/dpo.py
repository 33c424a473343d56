"""Direct preference optimization (DPO) on pairs of answers to one prompt, one of them preferred.

A run with a config section `preference` learns from pairs of its rollouts: of the actions
tried in one state, the action with the most credit is preferred to the one with the least.

Source: Rafailov et al. 2023, "Direct Preference Optimization"; the loss is in `losses.preference`.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from jax_ragrl.config.ranges import NotNegative, Positive
from jax_ragrl.errors import UserError
from jax_ragrl.learner.packing import Group, Minibatches, Turn, group_turns, lay_out
from jax_ragrl.learner.policies import Policies
from jax_ragrl.learner.state import Policy, PolicySpec
from jax_ragrl.learner.update import (
    likelihood_step,
    move_metrics,
    score_policy,
    warn_all_skipped,
)
from jax_ragrl.losses import dpo_loss
from jax_ragrl.rollout.tree import Forest, sibling_groups
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.runtime.sharding import data_parallel_size


class Pair(NamedTuple):
    """Two answers of a role to one prompt, as ids."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    role: str


@dataclasses.dataclass(frozen=True)
class Preference:
    """The config section `preference`; the objective then only selects the credit and the KL.

    Fields:
      beta: inverse temperature of the loss.
      margin: the credits of a pair differ by more than this.
    """

    beta: Positive = 0.1
    margin: NotNegative = 0.0


def pairs_of(
    forest: Forest, turns: Sequence[Turn], roles: Sequence[str], margin: float = 0.0
) -> list[Pair]:
    """Returns the best and the worst action of every decision of some roles.

    Their credits differ by more than `margin`. Actions without a turn (`packing.turns_of`) or with
    a credit that is not finite are in no pair. Of equal credits the first is taken.
    """
    credit = {turn.node: np.float32(turn.credit) for turn in turns if np.isfinite(turn.credit)}
    pairs = []
    for siblings in sibling_groups(forest):
        role = forest.records[siblings[0]].role
        nodes = [node for node in siblings if node in credit]
        if role not in roles or not nodes:
            continue
        best, worst = max(nodes, key=credit.__getitem__), min(nodes, key=credit.__getitem__)
        if credit[best] - credit[worst] > margin:
            chosen, rejected = (forest.records[n].action for n in (best, worst))
            assert chosen is not None and rejected is not None
            pairs.append(Pair(chosen.prompt_ids, chosen.ids, rejected.ids, role))
    return pairs


def prefer_all(
    policies: Policies,
    policy_of: Mapping[str, str],
    pairs: Sequence[Pair],
    beta: float,
    rng: random.Random,
    *,
    is_measured: bool = False,
) -> tuple[dict[str, Policy], dict[str, float]]:
    """Updates every policy on the pairs of its roles, `epochs * minibatches` times.

    Args:
      policy_of: from role to policy; frozen roles are not in it.
      beta: inverse temperature of the loss.
      is_measured: whether `update.move_metrics` are measured.

    Returns:
      The policies, and metrics: means over steps of the metrics of `dpo_update`, and the counts
      `skipped` (steps), `pairs` and `dropped_too_long` (pairs that exceed a row). With several
      policies the names begin with `<policy>/`.
    """
    result, metrics = dict(policies), dict[str, float]()
    for name, policy in policies.items():
        spec, own = policy.spec, [pair for pair in pairs if policy_of.get(pair.role) == name]
        fitting = [pair for pair in own if fits(spec, pair)]
        data = _laid_out(spec, fitting) if is_measured and fitting else None
        before_AT = None if data is None else score_policy(policy, data)
        values: dict[str, list[float]] = collections.defaultdict(list)
        for _ in range(spec.optimizer.epochs if fitting else 0):
            order = shuffled(rng, fitting)
            count = min(spec.optimizer.minibatches, len(order))
            for i in range(count):
                policy, step_metrics = dpo_update(policy, order[i::count], beta=beta)
                for key, value in step_metrics.items():
                    values[key].append(value)
        own_metrics = {key: float(np.mean(x)) for key, x in values.items()}
        if skipped := values.get("skipped"):
            # A mean would hide a single skipped step.
            own_metrics["skipped"] = float(sum(skipped))
            if all(skipped):
                warn_all_skipped()
        if data is not None and before_AT is not None:
            own_metrics |= move_metrics(policy, data, before_AT)
        own_metrics["pairs"] = float(len(fitting))
        own_metrics["dropped_too_long"] = float(len(own) - len(fitting))
        result[name] = policy
        prefix = f"{name}/" if len(policies) > 1 else ""
        metrics |= {f"{prefix}{key}": value for key, value in own_metrics.items()}
    return result, metrics


def fits(spec: PolicySpec, pair: Pair) -> bool:
    groups = _pair_groups(spec, 0, pair)
    return len(groups) == 1 and len(groups[0].turns) == 2


def dpo_update(
    policy: Policy, pairs: Sequence[Pair], *, beta: float = 0.1
) -> tuple[Policy, dict[str, float]]:
    """Takes one optimizer step on the mean DPO loss of some pairs.

    The buffers of the trained state are donated; each pair has to fit into a row. The metrics are
    `loss/dpo`, `right` (fraction of pairs whose chosen answer gained more log-probability than the
    rejected one), `grad_norm` and `skipped`. Raises `UserError` without a reference, or if
    parameters are no longer finite.
    """
    spec, state = policy
    if state.reference is None:
        raise UserError(
            "DPO needs a reference, but objective.kl.where is 'none': set it to loss, reward or "
            "terminal"
        )
    data = _laid_out(spec, pairs)
    # The chosen and the rejected answer of each pair: of equal pairs, too, nodes are different.
    actions_2B = np.argsort(data.actions.node_A).reshape(-1, 2).T
    logp_2B, ref_logp_2B = (
        score_policy(policy, data, params).sum(axis=1)[actions_2B]
        for params in (state.policy.params, state.reference)
    )

    def losses(logp_2B: Array) -> Array:
        return dpo_loss(*logp_2B, *ref_logp_2B, beta=beta)

    loss_B, pull = jax.vjp(losses, logp_2B)
    # The loss of a pair is no sum over tokens, but its gradient is one: that of the sum of all
    # log-probabilities, each times the derivative of the mean loss by it.
    (slope_2B,) = pull(np.full_like(loss_B, 1 / len(pairs)))
    slope_A = np.zeros(2 * len(pairs), np.float32)
    slope_A[actions_2B] = slope_2B
    policy, metrics = likelihood_step(
        policy, data.batches, data.by_row(-slope_A[:, None] * data.mask())
    )
    gained_2B = logp_2B - ref_logp_2B
    return policy, {
        "loss/dpo": float(loss_B.mean()),
        "right": float((gained_2B[0] > gained_2B[1]).mean()),
        "grad_norm": metrics["grad_norm"],
        "skipped": metrics["skipped"],
    }


def _laid_out(spec: PolicySpec, pairs: Sequence[Pair]) -> Minibatches:
    groups = [group for i, pair in enumerate(pairs) for group in _pair_groups(spec, i, pair)]
    devices = data_parallel_size(spec.mesh)
    return Minibatches([lay_out(groups, spec.roles, spec.layout, devices, spec.grammars)])


def _pair_groups(spec: PolicySpec, i: int, pair: Pair) -> list[Group]:
    """Returns one group if a pair fits; node `2 i` is its chosen answer, `2 i + 1` the rejected."""
    answers = enumerate((pair.chosen, pair.rejected))
    turns = [Turn(2 * i + k, pair.role, pair.prompt, ids) for k, ids in answers]
    return group_turns(turns, spec.layout)
