"""Metrics of rollouts: pure functions of a forest. `run.metric_names` lists all names and units."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jax_ragrl.retrieval.measures import names_of, recall_by_turn
from jax_ragrl.rollout.costs import FREE, Prices, step_costs
from jax_ragrl.rollout.expand import Expander
from jax_ragrl.rollout.rewards import AnswerMetric, answer_rewards
from jax_ragrl.rollout.searches import search_turns
from jax_ragrl.rollout.tree import LEAF, SEARCH, Forest, sibling_groups
from jax_ragrl.runtime.multihost import all_gather_object
from jax_ragrl.runtime.servers import take_counts

RewardTerms = Callable[[Forest], Mapping[str, np.ndarray]]
# The scores of a right and of a wrong answer. A reward need not see the differences in between.
RIGHT, WRONG = 1.0, 0.5
FEW_PAIRS = 6  # fewer say little about a reward that adds terms to the score of the answer


def describe_rollout(
    forest: Forest,
    credit_N: np.ndarray,
    reward_terms: RewardTerms | None = None,
    prices: Prices = FREE,
    metric: AnswerMetric | None = None,
) -> dict[str, float]:
    """Returns the metrics of a step's rollouts with their rewards.

    Args:
      credit_N: float, the credit of trained nodes; nan at all other nodes.
      reward_terms: from a forest to the terms of the leaves' reward, float32 `[N]` each.
      metric: the score of an answer against the gold answers, for `reward_order`.
    """
    terms = reward_terms(forest) if reward_terms and forest.leaf_N.any() else {}
    return (
        _sizes(forest)
        | own_reward(forest)
        | {f"reward_term/{name}": float(x_N[forest.leaf_N].mean()) for name, x_N in terms.items()}
        | (reward_order(forest, metric) if metric else {})
        | _role_metrics(forest, credit_N)
        | zero_variance_fraction(forest)
        | role_rewards(forest)
        | retrieval_recall(forest)
        | rollout_recall(forest)
        | searches_per_rollout(forest)
        | error_counts(forest)
        | step_costs(forest, prices)
        | strategy_rewards(forest)
        | rewarded_logps(forest)
        | removed_masses(forest)
    )


def _sizes(forest: Forest) -> dict[str, float]:
    leaves = np.flatnonzero(forest.leaf_N)
    # A step whose questions all failed says nothing about the policy.
    reward = {"reward/mean": float(forest.reward_N[leaves].mean())} if len(leaves) else {}
    # Forced actions count, and merged ones as often as they were sampled.
    actions = [(record.action, record.multiplicity) for record in forest.records]
    return reward | {
        "nodes": float(len(forest.records) - len(leaves)),
        "leaves": float(len(leaves)),
        "failed": float(len(forest.failed_questions)),
        "policy_tokens": float(sum(len(action.ids) * n for action, n in actions if action)),
    }


def own_reward(forest: Forest) -> dict[str, float]:
    """Returns `reward/own`: the mean reward of the policy's own choices; empty without forced ones.

    A leaf counts with the product, over the decisions above it, of the share of the samples that
    chose its action. Questions of which no leaf was sampled do not count.
    """
    if not forest.forced_N.any() or not forest.leaf_N.any():
        return {}
    samples_N, weight_N = forest.multiplicity_N - forest.forced_N, np.ones(len(forest.records))
    for group in sibling_groups(forest):
        weight_N[group] = samples_N[group] / max(samples_N[group].sum(), 1)
    for node, parent in enumerate(forest.parent_N.tolist()):  # parents come before their children
        if parent >= 0:
            weight_N[node] *= weight_N[parent]
    question_L, weight_L = forest.question_N[forest.leaf_N], weight_N[forest.leaf_N]
    total_Q = np.bincount(question_L, weight_L)
    reward_Q = np.bincount(question_L, weight_L * forest.reward_N[forest.leaf_N])
    has_own_Q = total_Q > 0
    if not has_own_Q.any():
        return {}
    return {"reward/own": float((reward_Q[has_own_Q] / total_Q[has_own_Q]).mean())}


def _role_metrics(forest: Forest, credit_N: np.ndarray) -> dict[str, float]:
    leaves, metrics = np.flatnonzero(forest.leaf_N), dict[str, float]()
    for role, nodes in nodes_by_role(forest).items():
        metrics[f"actions_per_rollout/{role}"] = len(nodes) / max(len(leaves), 1)
        if np.isfinite(credit_N[nodes]).any():
            metrics[f"credit/{role}"] = float(np.nanmean(credit_N[nodes]))
    return metrics | {f"valid_frac/{role}": x for role, (x, _) in valid_samples(forest).items()}


def valid_samples(forest: Forest) -> dict[str, tuple[float, int]]:
    """Returns the fraction of valid actions, and the number of sampled ones, per role."""
    result = dict[str, tuple[float, int]]()
    # An action may violate the rules only in its state: then the leaf below it has the error.
    leaves = np.flatnonzero(forest.leaf_N)
    invalid_nodes = {int(forest.parent_N[i]) for i in leaves if forest.records[i].parse_error}
    for role, nodes in nodes_by_role(forest).items():
        # Merged actions count as often as they were sampled, forced ones not at all.
        samples = forest.multiplicity_N[nodes] - forest.forced_N[nodes]
        if samples.any():
            valid = [i not in invalid_nodes and not forest.records[i].parse_error for i in nodes]
            result[role] = float(np.average(valid, weights=samples)), int(samples.sum())
    return result


def nodes_by_role(forest: Forest) -> dict[str, list[int]]:
    roles = sorted({record.role for record in forest.records if record.action is not None})
    return {role: [i for i, r in enumerate(forest.records) if r.role == role] for role in roles}


def expert_fractions(forest: Forest, expander: Expander, roles: Sequence[str]) -> dict[str, float]:
    """Returns `expert_frac/<role>`: the fraction of a role's decisions with an expert's action.

    An expander without an expert has no metrics.
    """
    if getattr(expander, "expert", None) is None:
        return {}
    has_expert: dict[str, list[bool]] = {}
    for nodes in sibling_groups(forest):
        role = forest.records[nodes[0]].role
        has_expert.setdefault(role, []).append(bool(forest.forced_N[nodes].any()))
    return {
        f"expert_frac/{role}": float(np.mean(has_expert[role]))
        for role in roles
        if role in has_expert
    }


def zero_variance_fraction(forest: Forest) -> dict[str, float]:
    """Returns `frac_reward_zero_std`: the fraction of questions whose leaves have equal rewards.

    Questions with a single leaf do not count; without any others there is no metric.
    """
    rewards: dict[int, list[float]] = collections.defaultdict(list)
    for i in np.flatnonzero(forest.leaf_N).tolist():
        rewards[int(forest.question_N[i])].append(float(forest.reward_N[i]))
    equal = [len(set(values)) == 1 for values in rewards.values() if len(values) > 1]
    return {"frac_reward_zero_std": float(np.mean(equal))} if equal else {}


def reward_order(forest: Forest, metric: AnswerMetric) -> dict[str, float]:
    """Returns `reward_order`: how often the reward of a right answer is above that of a wrong one.

    It is a fraction of the pairs of leaves of one question with scores of `RIGHT` and of at most
    `WRONG`; with fewer than `FEW_PAIRS` there is none. The verdict of a judge replaces `metric`.
    """
    score_N, orders = answer_rewards(forest, metric), list[bool]()
    for question in range(len(forest.questions)):
        leaves = forest.nodes_of(question)
        leaves = leaves[forest.leaf_N[leaves]]
        score_L, reward_L = score_N[leaves], forest.reward_N[leaves]
        is_pair_LL = (score_L[:, None] >= RIGHT) & (score_L[None, :] <= WRONG)
        orders += (reward_L[:, None] > reward_L[None, :])[is_pair_LL].tolist()
    return {"reward_order": float(np.mean(orders))} if len(orders) >= FEW_PAIRS else {}


def role_rewards(forest: Forest) -> dict[str, float]:
    """Returns the metrics of the actions' own rewards, if actions have any.

    `role_reward/<role>` is the mean over the role's samples, and `frac_reward_zero_std/<role>` the
    fraction of the role's groups in which all rewards are equal.
    """
    # Systems that reward only answers would log zeros for every role.
    if not forest.reward_N[~forest.leaf_N].any():
        return {}
    metrics = {}
    samples_N = forest.multiplicity_N - forest.forced_N
    equal: dict[str, list[bool]] = collections.defaultdict(list)
    for nodes in sibling_groups(forest):
        # A group of one sample has no variance to speak of.
        if forest.multiplicity_N[nodes].sum() > 1:
            rewards = set(forest.reward_N[nodes].tolist())
            equal[forest.records[nodes[0]].role].append(len(rewards) == 1)
    for role, nodes in nodes_by_role(forest).items():
        if samples_N[nodes].any():
            mean = np.average(forest.reward_N[nodes], weights=samples_N[nodes])
            metrics[f"role_reward/{role}"] = float(mean)
        if equal[role]:
            metrics[f"frac_reward_zero_std/{role}"] = float(np.mean(equal[role]))
    return metrics


def rewarded_logps(forest: Forest) -> dict[str, float]:
    """Returns `logp_rewarded/<role>`: the sampler's log-probability of rewarded actions.

    It is the mean in nats per token over the actions on paths to leaves with a positive reward.
    """
    nodes: set[int] = set()
    for leaf in np.flatnonzero(forest.leaf_N & (forest.reward_N > 0)).tolist():
        node = int(forest.parent_N[leaf])
        # Paths share their upper part, which is walked once.
        while node >= 0 and node not in nodes:
            nodes.add(node)
            node = int(forest.parent_N[node])
    logps: dict[str, list[float]] = collections.defaultdict(list)
    for i in sorted(nodes):
        action = forest.records[i].action
        logps[forest.records[i].role] += (action and action.logps) or ()
    return {f"logp_rewarded/{role}": float(np.mean(x)) for role, x in logps.items() if x}


def removed_masses(forest: Forest) -> dict[str, float]:
    """Returns `grammar_removed/<role>`: the mean probability that a strict grammar's mask removed.

    The mean is over the sampled tokens of the role. Without strict grammars there are no metrics.
    """
    sums: dict[str, np.ndarray] = {}
    for record in forest.records:
        if (action := record.action) and action.removed is not None and action.logps:
            tokens = record.multiplicity * len(action.logps)
            entry = np.array([tokens * action.removed, tokens])
            sums[record.role] = sums.get(record.role, np.zeros(2)) + entry
    return {f"grammar_removed/{role}": float(x / n) for role, (x, n) in sorted(sums.items())}


def error_counts(forest: Forest) -> dict[str, float]:
    """Returns the counts `invalid_action/<error>` and `unanswered/<reason>`.

    A merged action counts as often as it was sampled. The errors that a state corrected
    (`State.faults`) count as invalid actions.
    """
    counts: collections.Counter[str] = collections.Counter()
    for record in forest.records:
        if record.role == LEAF:
            counts.update(f"invalid_action/{fault}" for fault in record.state.faults)
            counts[f"unanswered/{record.finish_reason}"] += record.answer is None
        elif record.parse_error:
            counts[f"invalid_action/{record.parse_error}"] += record.multiplicity
    return {name: float(count) for name, count in counts.items() if count}


def strategy_rewards(forest: Forest) -> dict[str, float]:
    """Returns `strategy_reward/<strategy>`: the mean reward of each strategy's leaves."""
    rewards: dict[str, list[float]] = {}
    for i in np.flatnonzero(forest.leaf_N):
        if strategy := forest.records[i].state.strategy:
            rewards.setdefault(strategy, []).append(float(forest.reward_N[i]))
    return {f"strategy_reward/{name}": float(np.mean(x)) for name, x in rewards.items()}


def retrieval_recall(forest: Forest) -> dict[str, float]:
    """Returns `retrieval/recall`: the fraction of gold passages that any rollout's search returned.

    It is the mean over questions that name their gold passages.
    """
    names: dict[int, set[str]] = {}
    for i in np.flatnonzero(forest.leaf_N):
        record = forest.records[i]
        passages = (passage for call in record.calls for passage in call.passages)
        names.setdefault(record.question, set()).update(names_of(passages))
    recalls = [
        len(names.get(i, set()).intersection(question.gold)) / len(question.gold)
        for i, question in enumerate(forest.questions)
        if question.gold and i not in forest.failed_questions
    ]
    return {"retrieval/recall": float(np.mean(recalls))} if recalls else {}


def rollout_recall(forest: Forest) -> dict[str, float]:
    """Returns the recall of gold passages of single rollouts, the mean over leaves.

    `retrieval/recall_per_rollout` counts all passages that a rollout has seen, and
    `retrieval/recall_first_search` the passages of its first search (or concurrent searches): 0
    without a search. Only questions that name their gold passages count.
    """
    recalls = []
    for i in np.flatnonzero(forest.leaf_N).tolist():
        if gold := forest.questions[forest.records[i].question].gold:
            by_turn = recall_by_turn(gold, search_turns(forest.records[i])) or [0.0]
            recalls.append((by_turn[-1], by_turn[0]))
    if not recalls:
        return {}
    total, first = np.mean(recalls, axis=0).tolist()
    return {"retrieval/recall_per_rollout": total, "retrieval/recall_first_search": first}


def searches_per_rollout(forest: Forest) -> dict[str, float]:
    """Returns `searches_per_rollout`: the mean number of searches on the path to a leaf."""
    counts = [
        sum(call.purpose == SEARCH for call in forest.records[i].calls)
        for i in np.flatnonzero(forest.leaf_N).tolist()
    ]
    return {"searches_per_rollout": float(np.mean(counts))} if counts else {}


def server_metrics() -> dict[str, float]:
    """Returns the events of all clients of servers since the last call (a collective)."""
    total = collections.Counter[str]()
    for counts in all_gather_object(take_counts):
        total.update(counts)  # type: ignore[arg-type]
    return {name: float(count) for name, count in sorted(total.items())}
