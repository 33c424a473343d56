"""Metrics of a rollout: pure functions of a forest."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jax_ragrl.rollout.costs import step_costs
from jax_ragrl.rollout.expand import Expander
from jax_ragrl.rollout.tree import LEAF, Forest, decisions

Terms = Callable[[Forest], Mapping[str, np.ndarray]]


def describe(forest: Forest, known_N: np.ndarray, terms: Terms | None = None) -> dict[str, float]:
    """What a rollout was like: rewards and their `terms`, size, the credit of each role's trained
    actions (`known_N`, nan elsewhere), and the valid share of what it sampled.
    """
    leaves = np.flatnonzero(forest.leaf_N)
    metrics = {
        "reward/mean": float(forest.reward_N[leaves].mean()) if len(leaves) else 0.0,
        "nodes": float(len(forest.records) - len(leaves)),
        "leaves": float(len(leaves)),
        "failed": float(len(forest.failed)),
    }
    if terms is not None and len(leaves):
        metrics |= {f"reward/{k}": float(x_N[leaves].mean()) for k, x_N in terms(forest).items()}
    fatal = {int(forest.parent_N[i]) for i in leaves if forest.records[i].fault}
    for role, nodes in by_role(forest).items():
        metrics[f"actions/{role}"] = len(nodes) / max(len(leaves), 1)
        if np.isfinite(known_N[nodes]).any():
            metrics[f"credit/{role}"] = float(np.nanmean(known_N[nodes]))
        sampled = forest.multiplicity_N[nodes] - forest.forced_N[nodes]
        if sampled.any():
            valid = [i not in fatal and forest.records[i].fault == "" for i in nodes]
            metrics[f"valid_frac/{role}"] = float(np.average(valid, weights=sampled))
    return (
        metrics
        | zero_variance(forest)
        | own_rewards(forest)
        | found_gold(forest)
        | counts(forest)
        | step_costs(forest)
        | strategy_rewards(forest)
        | right_logps(forest)
    )


def by_role(forest: Forest) -> dict[str, list[int]]:
    """The numbers of the nodes of each role that wrote something, roles in order."""
    roles = sorted({record.role for record in forest.records if record.action is not None})
    return {role: [i for i, r in enumerate(forest.records) if r.role == role] for role in roles}


def expert_shares(forest: Forest, expander: Expander, roles: Sequence[str]) -> dict[str, float]:
    """The share of each trained role's decisions that hold an expert's action, where the expander
    asks an expert: how many questions or sub-goals it knew nothing of is not seen otherwise."""
    if getattr(expander, "expert", None) is None:
        return {}
    held: dict[str, list[bool]] = {}
    for nodes in decisions(forest):
        known = bool(forest.forced_N[nodes].any())
        held.setdefault(forest.records[nodes[0]].role, []).append(known)
    return {f"expert_frac/{role}": float(np.mean(held[role])) for role in roles if role in held}


def zero_variance(forest: Forest) -> dict[str, float]:
    """`zero_variance_frac`: the share of questions whose leaves all earned the same, of which no
    group learns. Of a single leaf there is nothing to say: where no question has more, nothing is.
    """
    earned: dict[int, list[float]] = collections.defaultdict(list)
    for i in np.flatnonzero(forest.leaf_N).tolist():
        earned[int(forest.question_N[i])].append(float(forest.reward_N[i]))
    same = [len(set(rewards)) == 1 for rewards in earned.values() if len(rewards) > 1]
    return {"zero_variance_frac": float(np.mean(same))} if same else {}


def own_rewards(forest: Forest) -> dict[str, float]:
    """Of each role, where actions earn something themselves: `earned/<role>`, the mean of what it
    sampled, and `zero_variance_frac/<role>`, the share of its groups in which all earned the same.
    """
    if not forest.reward_N[~forest.leaf_N].any():
        return {}
    metrics = {}
    sampled_N = forest.multiplicity_N - forest.forced_N
    same: dict[str, list[bool]] = collections.defaultdict(list)
    for nodes in decisions(forest):
        if forest.multiplicity_N[nodes].sum() > 1:
            rewards = set(forest.reward_N[nodes].tolist())
            same[forest.records[nodes[0]].role].append(len(rewards) == 1)
    for role, nodes in by_role(forest).items():
        if sampled_N[nodes].any():
            mean = np.average(forest.reward_N[nodes], weights=sampled_N[nodes])
            metrics[f"earned/{role}"] = float(mean)
        if same[role]:
            metrics[f"zero_variance_frac/{role}"] = float(np.mean(same[role]))
    return metrics


def right_logps(forest: Forest) -> dict[str, float]:
    """`logp_right/<role>`: the sampler's log-probability, nats a token, of what was written on the
    way to leaves that earned something. It falls where a policy unlearns what is right."""
    way: set[int] = set()
    for leaf in np.flatnonzero(forest.leaf_N & (forest.reward_N > 0)).tolist():
        node = int(forest.parent_N[leaf])
        while node >= 0 and node not in way:
            way.add(node)
            node = int(forest.parent_N[node])
    logps: dict[str, list[float]] = collections.defaultdict(list)
    for i in sorted(way):
        action = forest.records[i].action
        logps[forest.records[i].role] += (action and action.logps) or ()
    return {f"logp_right/{role}": float(np.mean(x)) for role, x in logps.items() if x}


def counts(forest: Forest) -> dict[str, float]:
    """How often what went wrong: `dead/<why>` and `malformed/<error>`, actions as often as they
    were written, and on leaves what their states put right."""
    seen: collections.Counter[str] = collections.Counter()
    for record in forest.records:
        if record.role == LEAF:
            seen.update(f"malformed/{fault}" for fault in getattr(record.state, "faults", ()))
            seen[f"dead/{record.why}"] += record.answer is None
        elif record.fault:
            seen[f"malformed/{record.fault}"] += record.multiplicity
    return {name: float(count) for name, count in seen.items() if count}


def strategy_rewards(forest: Forest) -> dict[str, float]:
    """The mean reward of the leaves of each strategy, where a system has strategies."""
    rewards: dict[str, list[float]] = {}
    for i in np.flatnonzero(forest.leaf_N):
        strategy = getattr(forest.records[i].state, "strategy", "")
        if strategy:
            rewards.setdefault(f"reward/{strategy}", []).append(float(forest.reward_N[i]))
    return {name: float(np.mean(values)) for name, values in rewards.items()}


def found_gold(forest: Forest) -> dict[str, float]:
    """`retrieval/recall`: the mean share of a question's gold passages that some search of its
    rollouts returned, where any question names its own."""
    found: dict[int, set[str]] = {}
    for i in np.flatnonzero(forest.leaf_N):
        record = forest.records[i]
        passages = (passage for call in record.calls for passage in call.found)
        names = {name for passage in passages for name in (passage.id, passage.title)}
        found.setdefault(record.question, set()).update(names)
    shares = [
        len(found.get(i, set()).intersection(question.gold)) / len(question.gold)
        for i, question in enumerate(forest.questions)
        if question.gold and i not in forest.failed
    ]
    return {"retrieval/recall": float(np.mean(shares))} if shares else {}
