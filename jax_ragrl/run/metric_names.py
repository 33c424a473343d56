"""The metrics that a training run logs: names, units and meanings.

A name is a pattern: `<role>` stands for the name of a role, `<error>` for an error message, and so
on. If a run has several policies, the metrics of an update (`per_policy`) begin with the name of
the policy: `plan/kl/mean`.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class Metric(NamedTuple):
    """One metric, or one family of metrics, of a training run; `name` is the pattern."""

    name: str
    unit: str
    meaning: str
    per_policy: bool = False


ROLLOUT = (
    Metric("reward/mean", "reward", "mean reward of the leaves of all rollouts"),
    Metric(
        "reward/own",
        "reward",
        "mean reward of the actions that the policy chose itself, if others are forced",
    ),
    Metric("reward_term/<term>", "reward", "mean of one summand of the leaves' reward (CoDA)"),
    Metric("strategy_reward/<strategy>", "reward", "mean reward of the leaves of a strategy"),
    Metric("role_reward/<role>", "reward", "mean reward of a role's sampled actions themselves"),
    Metric("credit/<role>", "reward", "mean credit of a role's trained actions"),
    Metric("questions/asked", "questions", "questions asked in the step, with a group rule"),
    Metric("questions/dead", "questions", "those whose actions all have advantage 0"),
    Metric("frac_reward_zero_std", "fraction", "questions whose leaves all have the same reward"),
    Metric(
        "frac_reward_zero_std/<role>",
        "fraction",
        "groups of a role's actions that all have the same reward",
    ),
    Metric(
        "reward_order",
        "fraction",
        "pairs of a right and a wrong answer to one question, of which the right one has the "
        "higher reward",
    ),
    Metric("valid_frac/<role>", "fraction", "sampled actions of a role that can be used"),
    Metric("invalid_action/<error>", "actions", "actions that violate the grammar, by error"),
    Metric("unanswered/<reason>", "rollouts", "rollouts that ended without an answer, by reason"),
    Metric("logp_rewarded/<role>", "nats per token", "log-probability of rewarded actions"),
    Metric(
        "grammar_removed/<role>",
        "probability",
        "probability that a strict grammar forbids, before the mask, mean over sampled tokens",
    ),
    Metric("expert_frac/<role>", "fraction", "decisions of a role that have an expert's action"),
    Metric("actions_per_rollout/<role>", "actions", "actions of a role per leaf"),
    Metric("nodes", "actions", "actions in all rollouts of the step"),
    Metric("leaves", "rollouts", "leaves in all rollouts of the step"),
    Metric(
        "policy_tokens",
        "tokens",
        "tokens of all actions of the step, trained or not: the budget to match between runs",
    ),
    Metric("failed", "questions", "questions whose environment failed"),
    Metric("staleness", "updates", "updates between the policies that sampled and those trained"),
    Metric("retrieval/recall", "fraction", "gold passages that some rollout's search returned"),
    Metric(
        "retrieval/recall_per_rollout",
        "fraction",
        "gold passages that the searches of one rollout returned, mean over leaves",
    ),
    Metric(
        "retrieval/recall_first_search",
        "fraction",
        "gold passages that the first search of one rollout returned, mean over leaves",
    ),
    Metric("searches_per_rollout", "calls", "searches on the path to a leaf, mean over leaves"),
    Metric("retrieval_calls", "calls", "searches of the step"),
    Metric("tool_calls", "calls", "calls of tools of the step"),
    Metric("passages", "passages", "passages that the searches of the step returned"),
    Metric("llm_calls", "calls", "calls to the frozen language model, without the judge"),
    Metric("llm_prompt_tokens", "tokens", "tokens that the frozen language model read"),
    Metric("llm_completion_tokens", "tokens", "tokens that the frozen language model wrote"),
    Metric("dollars", "dollars", "price of searches and of the frozen language model's tokens"),
)
SERVERS = (
    Metric(
        "llm_cache_hits",
        "replies",
        "replies from the cache or a file of replies, judge included",
    ),
    Metric("server_retries", "tries", "tries that failed and were made again, of all servers"),
    Metric("server_skipped", "requests", "requests not sent because their server was failing"),
    Metric("tool_refusals", "calls", "calls whose arguments a tool refused"),
)
UPDATE = tuple(
    Metric(*metric, per_policy=True)
    for metric in (
        ("loss/policy", "loss", "policy loss, weighted as in the objective"),
        ("loss/value", "loss", "value loss, weighted as in the objective"),
        ("loss/dpo", "loss", "DPO loss per pair"),
        ("right", "fraction", "pairs whose chosen answer gained more log-probability"),
        ("pairs", "pairs", "preference pairs of the update"),
        ("clip_frac", "fraction", "tokens whose ratio is outside of the clip range"),
        ("entropy", "nats per token", "entropy of the policy during the update"),
        ("entropy/old/mean", "nats per token", "entropy of the policy before the update"),
        ("entropy/old/<role>", "nats per token", "entropy before the update, of one role"),
        ("kl/mean", "nats per token", "divergence from the reference before the update"),
        ("kl/<role>", "nats per token", "divergence from the reference, of one role"),
        ("kl/loss", "nats per token", "KL estimate in the loss"),
        ("kl/coefficient", "reward per nat", "coefficient of the KL divergence"),
        ("update_kl/mean", "nats per token", "how far the update moved the policy on its actions"),
        ("update_kl/<role>", "nats per token", "how far the update moved the policy, of one role"),
        ("advantage/mean", "reward", "mean advantage over tokens"),
        ("advantage/<role>", "reward", "mean advantage over tokens, of one role"),
        ("advantage/std", "reward", "standard deviation of advantages over tokens"),
        ("advantage/std/<role>", "reward", "standard deviation of advantages, of one role"),
        ("value/mean", "reward", "mean value of the critic over tokens"),
        ("value/<role>", "reward", "mean value of the critic over tokens, of one role"),
        ("response_length/mean", "tokens", "mean length of trained actions"),
        ("response_length/<role>", "tokens", "mean length of trained actions, of one role"),
        ("grad_norm", "norm", "norm of the policy's gradient before clipping"),
        ("role_gradient/norm/<role>", "norm", "norm of a role's part of the gradient"),
        ("role_gradient/share/<role>", "fraction", "projection of that part on the whole gradient"),
        ("role_gradient/cosine/<role>/<other>", "cosine", "between the gradients of two roles"),
        ("value/grad_norm", "norm", "norm of the critic's gradient before clipping"),
        ("sampler_gap/max", "nats", "largest gap of sampler and learner on scored tokens"),
        ("sampler_gap/mean", "nats", "mean gap of sampler and learner over scored tokens"),
        ("importance_weight/mean", "ratio", "mean truncated importance weight over tokens"),
        ("importance_weight/capped", "fraction", "tokens whose importance weight is the cap"),
        ("dropped_too_long", "turns", "turns or pairs left out because they exceed a row"),
        ("skipped", "steps", "optimizer steps skipped because the gradient was not finite"),
        ("flops", "operations", "floating-point operations of the update"),
        ("zero_advantage_frac", "fraction", "tokens left out of the update: advantage 0"),
    )
)
EVALUATION = (
    Metric(
        "eval/accuracy",
        "fraction",
        "headline score on dev questions, greedy; absent if only some, below 90 %, had a score",
    ),
    Metric("eval/standard_error", "fraction", "standard error of `eval/accuracy` over questions"),
    Metric(
        "eval/drop",
        "standard errors",
        "best earlier `eval/accuracy` minus this one, in standard errors of their difference",
    ),
    Metric("eval/failed", "questions", "dev questions whose environment failed"),
    Metric("strategy_frac/<strategy>", "fraction", "dev questions answered with a strategy"),
)
GUARD = (
    Metric(
        "guard/incident/<indicator>", "as the threshold", "number of an incident, at its step only"
    ),
    Metric("guard/rate_factor", "fraction", "factor of the learning rate, if the guard lowered it"),
)
SPEED = (
    Metric("time/rollout_s", "seconds", "duration of the rollouts, with their credit"),
    Metric("time/train_s", "seconds", "duration of the update"),
    Metric("time/step_s", "seconds", "duration of the step, without its evaluation"),
    Metric("time/wait_rollout_s", "seconds", "time that the step waited for its rollouts"),
    Metric("time/wait_device_s", "seconds", "time that the rollouts waited for the devices"),
    Metric("time/wait_llm_s", "seconds", "time that they waited for a language model or judge"),
    Metric("time/wait_retriever_s", "seconds", "time that they waited for the retriever alone"),
    Metric("time/wait_host_s", "seconds", "time in which they waited for no call"),
    Metric("time/compile_s", "seconds", "compilation time within the other times"),
    Metric("compile/programs", "programs", "compiled or loaded from a cache since the step before"),
    Metric("compile/unexpected", "programs", "those after the first steps and evaluation"),
    Metric("tokens_per_sec", "tokens per second", "trained tokens per second of the update"),
    Metric("mfu", "fraction", "model FLOPs utilization of the update"),
    Metric("version_changes", "changes", "how often the run was continued with other versions"),
)
METRICS = (*ROLLOUT, *SERVERS, *UPDATE, *EVALUATION, *GUARD, *SPEED)


def metric_of(key: str) -> Metric | None:
    """Returns the metric that a key of `metrics.jsonl` belongs to; None if no pattern matches.

    If several patterns match, the one with the fewest placeholders counts, then the longest one.
    """
    matches = [metric for metric in METRICS if _pattern(metric).fullmatch(key)]
    # Literal parts are more specific than placeholders: `kl/mean` is not the metric of a role.
    by_generality = lambda metric: (metric.name.count("<"), -len(metric.name))  # noqa: E731
    return min(matches, key=by_generality, default=None)


@functools.cache
def _pattern(metric: Metric) -> re.Pattern[str]:
    # Errors and reasons are free text; names of roles, policies and strategies have no slash.
    free = {"error": ".+", "reason": ".+"}
    regex = [
        free.get(part, "[^/]+") if i % 2 else re.escape(part)
        for i, part in enumerate(re.split("<([a-z]+)>", metric.name))
    ]
    # Optional, because runs with one policy have no prefix.
    return re.compile(("(?:[^/]+/)?" if metric.per_policy else "") + "".join(regex))
