"""One update of a policy, and of its critic where it has one, from groups of turns and numbers."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ragrl.credit.assign import padded
from jax_ragrl.credit.kl import adapt
from jax_ragrl.learner.gradients import (
    Learner,
    Reading,
    add,
    apply,
    check_finite,
    gradient,
    score,
    zeros,
)
from jax_ragrl.learner.packing import (
    Actions,
    Batch,
    Group,
    by_action,
    by_row,
    conversations,
    joined,
    lay_out,
    masks,
    width_of,
)
from jax_ragrl.learner.state import Models, Net, Trainer, scalar
from jax_ragrl.learner.targets import Scored, Targets, credited
from jax_ragrl.learner.throughput import operations
from jax_ragrl.losses import role_sum_weights, sequence_mean_weights, token_mean_weights
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.runtime.sharding import fetch, on, place, share, ways


def update(
    trainer: Trainer,
    models: Models,
    groups: Sequence[Group],
    number_N: np.ndarray,
    sampled: Mapping[int, Sequence[float]],
    rng: random.Random,
) -> tuple[Models, dict[str, float]]:
    """Scores the groups, fixes their targets, and takes `epochs * minibatches` optimizer steps.

    Args:
      groups: turns to train, see `packing.turns_of` and `packing.grouped`.
      number_N: float32, a number a node: the credit that a critic's GAE spreads over its tokens, or
        the advantage itself (see `Objective.advantage`).
      sampled: the sampler's log-probabilities by node: the behaviour policy of stale rollouts, and
        compared with the scores in the metrics.
      rng: splits the groups into minibatches.

    Without groups nothing changes. Raises `UserError` if parameters are no longer finite.
    """
    if not groups:
        return models, {}
    with on(trainer.mesh):
        parts = _split(groups, trainer, rng)
        flat = [batch for part in parts for batch in part]
        scored = scored_actions(trainer, models, flat, number_N, sampled)
        targets, advantage_AT = fix_targets(trainer, models, parts, scored)
        seen, said = list[dict[str, Any]](), list[Reading]()
        for epoch in range(trainer.optimizer.epochs):
            for part, chosen in zip(parts, targets, strict=True):
                models, sums, readings = optimize(trainer, models, part, chosen)
                seen.append(sums)
                said += [] if epoch else readings
        scored = _heard(scored, said, flat, sampled)
    metrics = _means(fetch(seen)) | describe(trainer.roles, joined(flat), scored, advantage_AT)
    metrics["flops"] = operations(trainer, models, sum(group.tokens for group in groups))
    return _steered(trainer, models, metrics, len(scored.mask_AT)), metrics


def _split(groups: Sequence[Group], trainer: Trainer, rng: random.Random) -> list[list[Batch]]:
    """Random minibatches of groups, each laid out as batches of rows."""
    mixed = shuffled(rng, groups)
    count = min(trainer.optimizer.minibatches, len(mixed))
    parts = [mixed[i::count] for i in range(count)]
    return [lay_out(p, trainer.roles, trainer.layout, ways(trainer.mesh)) for p in parts]


# What a policy's reading tells of actions, see `_by_action`.
SAID = {"logp_AT": "logp_RM", "entropy_AT": "entropy_RM"}


def scored_actions(
    trainer: Trainer,
    models: Models,
    flat: Sequence[Batch],
    number_N: np.ndarray,
    sampled: Mapping[int, Sequence[float]],
) -> Scored:
    """What the models say of every action before the update; NumPy, and only what is needed."""
    o, width, actions = trainer.objective, width_of(flat, 32), joined(flat)
    numbers = number_N[actions.node_A].astype(np.float32)
    scored = Scored(masks(flat, width), numbers, paths(actions, o.span))
    seen = functools.partial(_seen, trainer, flat, width)
    if needs_old(trainer):
        fields = SAID | ({"value_AT": "value_RM"} if o.critic == "shared" else {})
        scored = scored._replace(**seen(trainer.policy, models.policy.params, fields))
        scored = scored._replace(behaviour_AT=_behaviour(scored.logp_AT, actions, sampled))
    if o.kl.where != "none":
        fields = {"ref_logp_AT": "logp_RM"}
        scored = scored._replace(**seen(trainer.policy, models.reference, fields))
    if trainer.critic is not None and models.critic is not None:
        fields = {"value_AT": "value_RM"}
        scored = scored._replace(**seen(trainer.critic, models.critic.params, fields))
    return scored


def _seen(
    trainer: Trainer,
    flat: Sequence[Batch],
    width: int,
    net: Net,
    params: Any,
    fields: Mapping[str, str],
) -> dict[str, np.ndarray]:
    """Fields of a model's readings as arrays `[A, T]`; `fields` maps their new names to them."""
    temperature = scalar(trainer.temperature, trainer.mesh)
    placed = place([batch.rows for batch in flat], trainer.mesh)
    fixed = (net.graph, params, net.frozen)
    readings = [score(*fixed, rows, temperature, trainer.allowed_ZV) for rows in placed]
    return _by_action(flat, readings, width, fields)


def _by_action(
    flat: Sequence[Batch], readings: Sequence[Reading], width: int, fields: Mapping[str, str]
) -> dict[str, np.ndarray]:
    return {
        name: by_action(flat, fetch([getattr(r, field) for r in readings]), width)
        for name, field in fields.items()
    }


def _heard(
    scored: Scored,
    said: Sequence[Reading],
    flat: Sequence[Batch],
    sampled: Mapping[int, Sequence[float]],
) -> Scored:
    """With what the policy said of the actions as it first learnt from them, for the metrics, where
    it was not scored before: in a single step that is the same."""
    if scored.logp_AT is not None:
        return scored
    scored = scored._replace(**_by_action(flat, said, scored.mask_AT.shape[1], SAID))
    return scored._replace(behaviour_AT=_behaviour(scored.logp_AT, joined(flat), sampled))


def paths(actions: Actions, span: str) -> np.ndarray:
    """What GAE runs over (see `gae_over_turns`), int32 `[C, S]`; few shapes are compiled."""
    if span == "turn":
        return np.arange(len(actions.node_A), dtype=np.int32)[:, None]
    found = conversations(actions)
    turns = -(-max(map(len, found)) // 4) * 4
    return np.array([path + [-1] * (turns - len(path)) for path in found], np.int32)


def needs_old(trainer: Trainer) -> bool:
    """Whether the policy is scored before it changes: its one step could otherwise tell as well."""
    o, steps = trainer.objective, trainer.optimizer.epochs * trainer.optimizer.minibatches
    in_reward = o.kl.where in ("reward", "terminal")
    return in_reward or o.critic == "shared" or o.stale_cap > 0 or (o.ratio != "none" and steps > 1)


def _behaviour(
    logp_AT: np.ndarray, actions: Actions, sampled: Mapping[int, Sequence[float]]
) -> np.ndarray:
    """The sampler's log-probabilities; where nothing sampled a node, the scores."""
    out = logp_AT.copy()
    for a, node in enumerate(actions.node_A.tolist()):
        if node in sampled:
            out[a, : actions.size_A[a]] = sampled[node]
    return out


def fix_targets(
    trainer: Trainer, models: Models, parts: Sequence[Sequence[Batch]], scored: Scored
) -> tuple[list[list[Targets]], np.ndarray]:
    """The targets of every batch, and all advantages `[A, T]`, whitened together if at all."""
    whole = jax.tree.map(lambda x: padded(x, 256), scored)
    whole = whole._replace(path_CS=padded(scored.path_CS, 256, -1))
    whole = share(whole, trainer.mesh)
    credit = fetch(credited(trainer.objective, whole, models.kl_coefficient))
    advantage_AT, return_AT, importance_AT = (x[: len(scored.mask_AT)] for x in credit)
    weights = [token_weights(trainer, part, scored.mask_AT.shape[1]) for part in parts]
    weight_AT, value_weight_AT = (np.concatenate(w) for w in zip(*weights, strict=True))
    fixed = Targets(advantage_AT, weight_AT * importance_AT, scored.logp_AT, scored.ref_logp_AT)
    if scored.value_AT is not None:
        fixed = fixed._replace(
            old_value=scored.value_AT, returns=return_AT, value_weight=value_weight_AT
        )
    flat = [batch for part in parts for batch in part]
    fields = [[None] * len(flat) if x is None else by_row(flat, x) for x in fixed]
    dealt = iter([Targets(*of_one) for of_one in zip(*fields, strict=True)])
    return [[next(dealt) for _ in part] for part in parts], advantage_AT


def token_weights(
    trainer: Trainer, part: Sequence[Batch], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weights a token of a minibatch, of the policy and of the critic: float32 `[A, T]` each."""
    o, mask_AT = trainer.objective, masks(part, width)
    pooled_AT = token_mean_weights(mask_AT)
    if o.aggregation == "token_mean":
        return pooled_AT, pooled_AT
    if o.aggregation == "sequence_mean":
        return sequence_mean_weights(mask_AT), pooled_AT
    by_role = np.array(o.weights_of(trainer.roles))
    return role_sum_weights(mask_AT, joined(part).role_A, by_role), pooled_AT


def optimize(
    trainer: Trainer, models: Models, part: Sequence[Batch], targets: Sequence[Targets]
) -> tuple[Models, dict[str, Any], list[Reading]]:
    """One optimizer step of each model on a minibatch, its gradients summed exactly; with the sums
    of metrics, and what the policy said of each batch unless it was scored before."""
    learner, sums, said = _descend(trainer, trainer.policy, models.policy, models, part, targets)
    if trainer.critic is None or models.critic is None:
        return models._replace(policy=learner), sums, said
    critic, more, _ = _descend(trainer, trainer.critic, models.critic, models, part, targets)
    more |= {f"value/{name}": more.pop(name) for name in ("grad_norm", "not_finite")}
    sums |= more | {"skipped": sums["skipped"] + more["skipped"]}
    return models._replace(policy=learner, critic=critic), sums, said


def _descend(
    trainer: Trainer,
    net: Net,
    learner: Learner,
    models: Models,
    part: Sequence[Batch],
    targets: Sequence[Targets],
) -> tuple[Learner, dict[str, Any], list[Reading]]:
    temperature = scalar(trainer.temperature, trainer.mesh)
    coefficient = models.kl_coefficient
    grads, sums, said = zeros(learner.params, net.layout), list[dict[str, Any]](), list[Reading]()
    # At once: several hosts compare what they place, for which each waits for the others.
    batches = [(batch.rows, target) for batch, target in zip(part, targets, strict=True)]
    for rows, target in place(batches, trainer.mesh):
        grads, more, reading = gradient(
            *(net.graph, learner.params, net.frozen, rows, target, temperature, coefficient),
            trainer.allowed_ZV,
            objective=trainer.objective,
            layout=net.layout,
            total=grads,  # the one tree of gradients that there is
        )
        sums.append(more)
        said += [] if reading is None else [reading]
    learner, stepped = apply(net.optimizer, learner, grads)
    return learner, functools.reduce(add, sums) | stepped, said


def _means(seen: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of the optimizer steps: means over tokens or steps, and the number skipped.

    Raises `UserError` if a step left parameters that are not finite.
    """
    sums = {name: float(sum(step[name] for step in seen)) for name in seen[0]}
    check_finite(sums)
    tokens = max(sums.pop("tokens"), 1.0)
    names = {"clipped": "clip_frac", "entropy": "entropy", "kl": "kl/loss"}
    metrics = {new: sums.pop(old) / tokens for old, new in names.items() if old in sums}
    skipped = sums.pop("skipped")
    if skipped == len(seen) * (2 if "value/grad_norm" in sums else 1):
        warn_of_skipped()
    return metrics | {k: v / len(seen) for k, v in sums.items()} | {"skipped": skipped}


def warn_of_skipped() -> None:
    """Warns that an update changed nothing."""
    warnings.warn(
        "every optimizer step of an update was skipped, for no gradient was finite: nothing was "
        "learned. If this persists, lower the learning rate and check the rewards",
        stacklevel=3,
    )


def describe(
    roles: Sequence[str], actions: Actions, scored: Scored, advantage_AT: np.ndarray
) -> dict[str, float]:
    """What the actions were like: means over tokens, of all and by role; `response_length` and
    `advantage/std` over actions, and the largest gap between the scores and the sampler."""
    mask_AT = scored.mask_AT
    shown = {"advantage": advantage_AT, "value": scored.value_AT, "entropy/old": scored.entropy_AT}
    if scored.logp_AT is not None and scored.ref_logp_AT is not None:
        shown["kl"] = scored.logp_AT - scored.ref_logp_AT
    metrics = {"response_length/mean": float(actions.size_A.mean())}
    for name, x_AT in shown.items():
        if x_AT is not None:
            metrics[f"{name}/mean"] = float(x_AT[mask_AT].mean())
    metrics["advantage/std"] = float(advantage_AT[mask_AT].std())
    for z in np.unique(actions.role_A).tolist():
        own_AT = mask_AT & (actions.role_A == z)[:, None]
        metrics[f"response_length/{roles[z]}"] = float(own_AT.sum() / (actions.role_A == z).sum())
        metrics |= {
            f"{name}/{roles[z]}": float(x_AT[own_AT].mean())
            for name, x_AT in shown.items()
            if x_AT is not None
        }
        metrics[f"advantage/std/{roles[z]}"] = float(advantage_AT[own_AT].std())
    if scored.logp_AT is not None:
        gap_AT = np.abs(scored.logp_AT - scored.behaviour_AT)
        metrics["sampler_gap/max"] = float(gap_AT[mask_AT].max())
    return metrics


def _steered(trainer: Trainer, models: Models, metrics: dict[str, float], actions: int) -> Models:
    """The KL coefficient of the next update; `metrics` gets the one of this."""
    kl = trainer.objective.kl
    if kl.where == "none":
        return models
    now = float(fetch(models.kl_coefficient))
    metrics["kl/coefficient"] = now
    if not kl.target:
        return models
    # Of the scores where the reward or a ratio needed them, and else of the loss.
    name = "kl/mean" if needs_old(trainer) else "kl/loss"
    nats = metrics[name] * metrics["response_length/mean"]
    after = adapt(now, nats, actions, target=kl.target, horizon=kl.horizon, floor=kl.floor)
    return models._replace(kl_coefficient=scalar(after, trainer.mesh))
