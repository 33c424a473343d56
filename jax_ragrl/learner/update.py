"""One update of a policy, and of its critic if it has one, from groups of turns with credit."""

from __future__ import annotations

import functools
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ragrl.credit.assign import pad_rows
from jax_ragrl.credit.kl import adapt
from jax_ragrl.learner.gradients import TokenOutputs, TrainState, add, apply, check_finite
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Actions, Batch, Group, Minibatches, conversations, lay_out
from jax_ragrl.learner.passes import POLICY_FIELDS, accumulate, by_action, model_outputs
from jax_ragrl.learner.role_gradients import role_gradient_metrics
from jax_ragrl.learner.state import ModelSpec, Policy, PolicySpec, scalar
from jax_ragrl.learner.targets import ActionScores, Targets, compute_advantages
from jax_ragrl.learner.throughput import update_flops
from jax_ragrl.losses import role_sum_weights, sequence_mean_weights, token_mean_weights
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.runtime.sharding import data_parallel_size, mesh_context, replicate, to_host
from jax_ragrl.runtime.small_programs import start

# A model's state after an optimizer step, sums of metrics, and the policy's outputs per batch.
Step = tuple[TrainState, dict[str, Any], list[TokenOutputs]]


def update(
    policy: Policy,
    groups: Sequence[Group],
    rng: random.Random,
    *,
    is_measured: bool = False,
    by_role: bool = False,
) -> tuple[Policy, dict[str, float]]:
    """Scores the groups, computes their targets, and takes `epochs * minibatches` optimizer steps.

    Returns the policy and metrics (see `action_metrics` and `_step_metrics`).

    Args:
      policy: the policy; the buffers of its trained state are donated.
      groups: turns to train, with their credit: the reward that a critic's GAE spreads over the
        tokens, or the advantage itself (see `Objective.advantage`). Without groups nothing changes,
        nor if all credits are 0 and `objective.skip_zero_advantage` is set.
      is_measured: whether `move_metrics` are measured after the steps.
      by_role: whether `role_gradients` are measured before the steps.

    Raises:
      UserError: parameters are no longer finite.
    """
    if not groups:
        return policy, {}
    spec = policy.spec
    if spec.objective.skip_zero_advantage and not _have_credit(groups):
        return policy, {"zero_advantage_frac": 1.0}
    with mesh_context(spec.mesh):
        data = split_minibatches(groups, spec, rng)
        scores = score_actions(policy, data)
        targets, advantage_AT, importance_AT = compute_targets(policy, data, scores)
        by_role_metrics = role_gradient_metrics(policy, data, targets) if by_role else {}
        policy, sums, outputs = _optimize_all(policy, data, targets)
        if not needs_old_logps(spec):
            # For the metrics. With a single step, these are the outputs of a scoring pass.
            scores = scores._replace(**by_action(data, outputs, POLICY_FIELDS))
            scores = _with_behaviour_logps(scores, data)
        moved = dict[str, float]()
        if is_measured:
            is_single = spec.optimizer.epochs * spec.optimizer.minibatches == 1
            # Without a scoring pass, the outputs for later minibatches are after earlier steps.
            is_before = needs_old_logps(spec) or is_single
            before_AT = scores.logp_AT if is_before else scores.behaviour_logp_AT
            moved = move_metrics(policy, data, before_AT)
    metrics = _step_metrics(to_host(sums)) | by_role_metrics | moved
    metrics |= action_metrics(spec.roles, data.actions, scores, advantage_AT)
    if cap := spec.objective.importance_weight_cap:
        weights = importance_AT[scores.mask_AT]
        metrics["importance_weight/mean"] = float(weights.mean())
        metrics["importance_weight/capped"] = float((weights >= cap).mean())
    tokens = sum(group.tokens for group in groups)
    metrics["flops"] = update_flops(policy, tokens - data.skipped_tokens)
    if spec.objective.skip_zero_advantage:
        metrics["zero_advantage_frac"] = data.skipped_tokens / tokens
    return _adapt_kl(policy, metrics, len(scores.mask_AT)), metrics


def split_minibatches(groups: Sequence[Group], spec: PolicySpec, rng: random.Random) -> Minibatches:
    """Splits groups at random into minibatches, each packed into batches of rows.

    With `objective.skip_zero_advantage`, groups whose credits are all 0 are left out, and the
    others keep the weights that they have among all groups (`Minibatches.share_PZ`).
    """
    order = shuffled(rng, groups)
    count = min(spec.optimizer.minibatches, len(order))
    parts = kept = [order[i::count] for i in range(count)]
    # After the split, so that every group is in the minibatch that it would be in without this.
    if spec.objective.skip_zero_advantage:
        with_credit = [[g for g in part if _have_credit([g])] for part in parts]
        # Never empty, because the optimizer steps without a gradient too (momentum).
        kept = [some or part[:1] for some, part in zip(with_credit, parts, strict=True)]
    kept_PZ, all_PZ = ([_denominators(spec, part) for part in x] for x in (kept, parts))
    tokens = [sum(group.tokens for part in x for group in part) for x in (parts, kept)]
    devices = data_parallel_size(spec.mesh)
    return Minibatches(
        [lay_out(part, spec.roles, spec.layout, devices, spec.grammars) for part in kept],
        share_PZ=(np.stack(kept_PZ) / np.maximum(np.stack(all_PZ), 1)).astype(np.float32),
        skipped_tokens=tokens[0] - tokens[1],
    )


def _have_credit(groups: Sequence[Group]) -> bool:
    return any(turn.credit for group in groups for turn in group.turns)


def _denominators(spec: PolicySpec, groups: Sequence[Group]) -> np.ndarray:
    """Returns what the aggregation divides by (tokens or actions), by role, float64 `[Z]`."""
    count_Z = np.zeros(len(spec.roles))
    for turn in (turn for group in groups for turn in group.turns):
        size = len(turn.ids)
        is_mean = spec.objective.aggregation == "sequence_mean"
        count_Z[spec.roles.index(turn.role)] += min(size, 1) if is_mean else size
    by_role = spec.objective.aggregation == "role_sum"
    return count_Z if by_role else np.full_like(count_Z, count_Z.sum())


def _optimize_all(
    policy: Policy, data: Minibatches, targets: Sequence[Sequence[Targets]]
) -> tuple[Policy, list[dict[str, Any]], list[TokenOutputs]]:
    """Takes the optimizer steps of all epochs; the outputs come from the first epoch."""
    sums, outputs = list[dict[str, Any]](), list[TokenOutputs]()
    # The targets stay fixed while the policy changes, as in PPO.
    for epoch in range(policy.spec.optimizer.epochs):
        for batches, batch_targets in zip(data.parts, targets, strict=True):
            policy, step_sums, step_outputs = optimize(policy, batches, batch_targets)
            sums.append(step_sums)
            # Metrics describe the policy that sampled, so only the first pass counts.
            outputs += [] if epoch else step_outputs
    return policy, sums, outputs


def score_actions(policy: Policy, data: Minibatches) -> ActionScores:
    """Scores all actions with the models that the objective needs, before the update."""
    spec, state = policy
    o = spec.objective
    scores = ActionScores(data.mask(), data.actions.credit_A, gae_paths(data.actions, o.gae_span))
    run = functools.partial(model_outputs, spec, data)
    if needs_old_logps(spec):
        fields = POLICY_FIELDS | ({"value_AT": "value_RM"} if o.critic == "shared" else {})
        scores = scores._replace(**run(spec.policy, state.policy.params, fields))
        scores = _with_behaviour_logps(scores, data)
    if o.kl.where != "none":
        fields = {"ref_logp_AT": "logp_RM"}
        scores = scores._replace(**run(spec.policy, state.reference, fields))
    if spec.critic is not None and state.critic is not None:
        fields = {"value_AT": "value_RM"}
        scores = scores._replace(**run(spec.critic, state.critic.params, fields))
    return scores


def score_policy(policy: Policy, data: Minibatches, params: Any = None) -> np.ndarray:
    """Returns the log-probabilities of all actions, float32 `[A, T]`.

    They are those of a policy, or of its model with other parameters, such as its reference.
    """
    spec, params = policy.spec, policy.state.policy.params if params is None else params
    with mesh_context(spec.mesh):
        return model_outputs(spec, data, spec.policy, params, {"logp_AT": "logp_RM"})["logp_AT"]


def move_metrics(policy: Policy, data: Minibatches, before_AT: np.ndarray) -> dict[str, float]:
    """Returns how far an update moved a policy on actions, over all of them and by role.

    `before_AT` are their float32 log-probabilities under the policy that sampled them.
    """
    kl_AT, mask_AT = update_kl(before_AT, score_policy(policy, data)), data.mask()
    metrics = {"update_kl/mean": float(kl_AT[mask_AT].mean())}
    for z in np.unique(data.actions.role_A).tolist():
        own_AT = mask_AT & (data.actions.role_A == z)[:, None]
        metrics[f"update_kl/{policy.spec.roles[z]}"] = float(kl_AT[own_AT].mean())
    return metrics


def update_kl(before: np.ndarray, after: np.ndarray, clamp: float = 10.0) -> np.ndarray:
    """Returns how far an update moved the policy on tokens that the policy before it sampled.

      k3 = min(exp(d) - 1 - d, clamp),   d = after - before

    Its mean estimates the divergence of the policy after the update from the one before, without
    bias up to the clamp in nats, so that no single token decides. `losses.kl_k3` is the same on
    devices.
    """
    # Past clamp + 1 on either side the estimate exceeds the clamp, and exp must not overflow.
    # A log-probability that is not a number is as far as can be.
    d = np.nan_to_num(np.clip(after - before, -(clamp + 1), clamp + 1), nan=clamp + 1)
    return np.minimum(np.expm1(d) - d, clamp)


def _with_behaviour_logps(scores: ActionScores, data: Minibatches) -> ActionScores:
    """Adds the sampler's log-probabilities; the policy's own if no sampler wrote the action."""
    behaviour_AT = data.by_action([batch.behaviour_logp_RM for batch in data.batches])
    behaviour_AT = np.where(np.isnan(behaviour_AT), scores.logp_AT, behaviour_AT)
    return scores._replace(behaviour_logp_AT=behaviour_AT)


def gae_paths(actions: Actions, span: str) -> np.ndarray:
    """Returns the sequences of actions that GAE runs over, int32 `[C, S]`, padded with -1.

    `span` is `turn` (every action alone) or `conversation`; see `gae_over_turns`.
    """
    if span == "turn":
        return np.arange(len(actions.node_A), dtype=np.int32)[:, None]
    paths = conversations(actions)
    turns = -(-max(map(len, paths)) // 4) * 4  # rounded up, so that few shapes are compiled
    return np.array([path + [-1] * (turns - len(path)) for path in paths], np.int32)


def needs_old_logps(spec: PolicySpec) -> bool:
    return scores_before_update(spec.objective, spec.optimizer)


def scores_before_update(o: Objective, optimizer: Optimizer) -> bool:
    """Whether a policy is scored before an update; else its first gradient pass scores it."""
    has_ratio = o.reads("old_logp", "action_gap")
    return (
        o.kl.where in ("reward", "terminal")
        or o.critic == "shared"
        or o.importance_weight_cap > 0
        or (optimizer.epochs * optimizer.minibatches > 1 and has_ratio)
    )


def compute_targets(
    policy: Policy, data: Minibatches, scores: ActionScores
) -> tuple[list[list[Targets]], np.ndarray, np.ndarray]:
    """Returns the targets of each batch of each minibatch, all advantages and importance weights.

    The latter two are float32 `[A, T]`. Advantages are whitened over all minibatches at once.
    """
    spec, o = policy.spec, policy.spec.objective
    # Padding the number of actions keeps the number of compiled shapes small.
    padded_scores = jax.tree.map(lambda x: pad_rows(x, 256), scores)
    padded_scores = padded_scores._replace(path_CS=pad_rows(scores.path_CS, 256, -1))
    padded_scores = replicate(padded_scores, spec.mesh)
    credit = to_host(compute_advantages(o, padded_scores, policy.state.kl_coefficient))
    advantage_AT, return_AT, importance_AT = (x[: len(scores.mask_AT)] for x in credit)
    parts = zip(data.by_part(scores.mask_AT), data.by_part(data.actions.role_A), strict=True)
    weights = [token_weights(o, mask_AT, role_A) for mask_AT, role_A in parts]
    weight_AT, value_weight_AT = (np.concatenate(w) for w in zip(*weights, strict=True))
    weight_AT = weight_AT * data.shares()[:, None]
    # Importance weights multiply the loss like the weights of the aggregation.
    targets = Targets(advantage_AT, weight_AT * importance_AT, scores.logp_AT, scores.ref_logp_AT)
    if scores.value_AT is not None:
        targets = targets._replace(
            old_value=scores.value_AT, returns=return_AT, value_weight=value_weight_AT
        )
    if o.reads("action_size", "action_gap"):
        targets = targets._replace(
            first=np.broadcast_to(data.actions.first_A[:, None], scores.mask_AT.shape)
        )
    fields = [[None] * len(data.batches) if x is None else data.by_row(x) for x in targets]
    by_batch = [Targets(*of_one) for of_one in zip(*fields, strict=True)]
    return data.regroup(by_batch), advantage_AT, importance_AT


def token_weights(
    o: Objective, mask_AT: np.ndarray, role_A: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights per token of a minibatch for the policy and the critic, float32 `[A, T]`.

    `mask_AT` are the tokens of its actions, bool, and `role_A` their role numbers, int32.
    """
    token_mean_AT = token_mean_weights(mask_AT)
    if o.aggregation == "token_mean":
        return token_mean_AT, token_mean_AT
    if o.aggregation == "sequence_mean":
        return sequence_mean_weights(mask_AT), token_mean_AT
    return role_sum_weights(mask_AT, role_A), token_mean_AT


def optimize(
    policy: Policy, batches: Sequence[Batch], targets: Sequence[Targets]
) -> tuple[Policy, dict[str, Any], list[TokenOutputs]]:
    """Takes one optimizer step of each model on a minibatch; donates the trained state.

    Returns the policy, sums of metrics, and per batch the policy's outputs if it was not scored.
    """
    spec, state = policy

    def take_step(model: ModelSpec, of_model: TrainState) -> Step:
        def step() -> Step:
            with mesh_context(spec.mesh):  # another thread may run this
                grads, sums, outputs = accumulate(policy, model, of_model.params, batches, targets)
                new_state, metrics = apply(model.optimizer, of_model, grads)
                return new_state, functools.reduce(add, sums) | metrics, outputs

        # The steps of policy and critic are independent: both may run at the same time.
        return start(step, concurrently=spec.is_concurrent(of_model.params))

    actor, sums, outputs = take_step(spec.policy, state.policy)
    if spec.critic is None or state.critic is None:
        return policy.with_state(policy=actor), sums, outputs
    critic, more, _ = take_step(spec.critic, state.critic)
    # Both models have these metrics; `skipped` counts the steps of both.
    more |= {f"value/{name}": more.pop(name) for name in ("grad_norm", "not_finite")}
    sums |= more | {"skipped": sums["skipped"] + more["skipped"]}
    return policy.with_state(policy=actor, critic=critic), sums, outputs


# No ratio, no reference, no critic.
LIKELIHOOD = Objective(
    "policy_gradient_loss", critic="none", advantage="group_centred", kl=KL("none")
)


def likelihood_step(
    policy: Policy, batches: Sequence[Batch], weights: Sequence[np.ndarray]
) -> tuple[Policy, dict[str, float]]:
    """Takes one optimizer step that raises the sum of log-probabilities, each times its weight.

    The buffers of the trained state are donated. `weights` are float32 `[R, M]`, one array per
    batch. Returns the policy and the metrics of `gradients.gradient` and `gradients.apply`;
    `loss/policy` is minus the weighted sum. Raises `UserError` if parameters are no longer finite.
    """
    spec = policy.spec
    plain_spec = spec._replace(objective=LIKELIHOOD, critic=None)
    masks = [batch.rows.mask_RM.astype(np.float32) for batch in batches]
    targets = [Targets(advantage=x, weight=w) for x, w in zip(masks, weights, strict=True)]
    with mesh_context(spec.mesh):
        result, sums, _ = optimize(Policy(plain_spec, policy.state), batches, targets)
    metrics = {name: float(x) for name, x in to_host(sums).items()}
    check_finite(metrics)
    return Policy(spec, result.state), metrics


def _step_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns means over tokens or optimizer steps, and the number of skipped steps."""
    sums = {name: float(sum(step[name] for step in steps)) for name in steps[0]}
    check_finite(sums)
    # At least 1: without scored tokens all sums are 0.
    tokens = max(sums.pop("tokens"), 1.0)
    names = {"clipped": "clip_frac", "entropy": "entropy", "kl": "kl/loss"}
    metrics = {new: sums.pop(old) / tokens for old, new in names.items() if old in sums}
    skipped_steps = sums.pop("skipped")
    # With a critic, each optimizer step is two steps.
    if skipped_steps == len(steps) * (2 if "value/grad_norm" in sums else 1):
        warn_all_skipped()
    return metrics | {k: v / len(steps) for k, v in sums.items()} | {"skipped": skipped_steps}


def warn_all_skipped() -> None:
    warnings.warn(
        "every optimizer step of an update was skipped because no gradient was finite: nothing was "
        "learned. If this persists, lower the learning rate and check the rewards",
        stacklevel=3,
    )


def action_metrics(
    roles: Sequence[str], actions: Actions, scores: ActionScores, advantage_AT: np.ndarray
) -> dict[str, float]:
    """Returns statistics of the trained actions: over all of them, and by role.

    `response_length` is a mean over actions, the others are over tokens. `sampler_gap` is the
    difference in nats between the policy's and the sampler's log-probabilities, without its sign.
    """
    mask_AT = scores.mask_AT
    means = {"advantage": advantage_AT, "value": scores.value_AT, "entropy/old": scores.entropy_AT}
    if scores.logp_AT is not None and scores.ref_logp_AT is not None:
        means["kl"] = scores.logp_AT - scores.ref_logp_AT
    metrics = {"response_length/mean": float(actions.size_A.mean())}
    metrics |= {f"{name}/mean": mean for name, mean in _means(means, mask_AT).items()}
    metrics["advantage/std"] = float(advantage_AT[mask_AT].std())
    for z in np.unique(actions.role_A).tolist():
        own_AT = mask_AT & (actions.role_A == z)[:, None]
        metrics[f"response_length/{roles[z]}"] = float(own_AT.sum() / (actions.role_A == z).sum())
        metrics |= {f"{name}/{roles[z]}": mean for name, mean in _means(means, own_AT).items()}
        metrics[f"advantage/std/{roles[z]}"] = float(advantage_AT[own_AT].std())
    if scores.logp_AT is not None:
        gaps = np.abs(scores.logp_AT - scores.behaviour_logp_AT)[mask_AT]
        metrics |= {"sampler_gap/max": float(gaps.max()), "sampler_gap/mean": float(gaps.mean())}
    return metrics


def _means(outputs: Mapping[str, Any], mask_AT: np.ndarray) -> dict[str, float]:
    of_mask = {name: x_AT[mask_AT] for name, x_AT in outputs.items() if x_AT is not None}
    return {name: float(x.mean()) for name, x in of_mask.items() if x.size}


def _adapt_kl(policy: Policy, metrics: dict[str, float], actions: int) -> Policy:
    """Sets the KL coefficient of the next update; adds the current one to `metrics`."""
    kl = policy.spec.objective.kl
    if kl.where == "none":
        return policy
    current = float(to_host(policy.state.kl_coefficient))
    metrics["kl/coefficient"] = current
    if not kl.target:
        return policy
    # The scores before the update if there are any; otherwise the mean over its loss terms.
    name = "kl/mean" if needs_old_logps(policy.spec) else "kl/loss"
    nats = metrics[name] * metrics["response_length/mean"]
    coefficient = adapt(
        current,
        nats,
        actions,
        target=kl.target,
        horizon=kl.horizon,
        floor=kl.min_coefficient,
        ceiling=kl.max_coefficient or math.inf,
    )
    return policy.with_state(kl_coefficient=scalar(coefficient, policy.spec.mesh))
