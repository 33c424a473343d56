"""One PPO update of a policy and its critic from a forest and its credit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from jax_ragrl.batch import Group, Layout, Rows, lay_out
from jax_ragrl.draws import shuffled
from jax_ragrl.errors import UserError
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.heads import Critic, copy_decoder
from jax_ragrl.train.step import (
    Learner,
    Targets,
    add,
    apply,
    assess,
    policy_gradient,
    ppo_targets,
    score,
    value_gradient,
)


@dataclasses.dataclass(frozen=True)
class PPO:
    """The objective's numbers.

    `aggregation` is `role_sum` (each role's token mean, summed: C-3PO, App. A.1) or `token_mean`
    (all tokens pooled). The critic's loss is always a token mean.
    """

    policy_lr: float
    value_lr: float
    kl_coefficient: float = 0.005
    clip: float = 0.2
    value_clip: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    epochs: int = 1
    minibatches: int = 1
    max_grad_norm: float = 1.0
    aggregation: str = "role_sum"


class Models(NamedTuple):
    """What an update changes, and the frozen reference."""

    policy: Learner
    critic: Learner
    reference: Any


class Trainer(NamedTuple):
    """What an update does not change: graphs, optimizers, numbers and shapes."""

    policy_graph: Any
    critic_graph: Any
    policy_optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation
    config: PPO
    layout: Layout
    roles: tuple[str, ...]
    temperature: float


def prepare(
    policy: Decoder,
    config: PPO,
    layout: Layout,
    roles: Sequence[str],
    temperature: float,
    steps: int,
) -> tuple[Trainer, Models]:
    """Trainer and models of a run of `steps` updates from `policy`; the critic is its copy."""
    if config.aggregation not in ("role_sum", "token_mean"):
        raise UserError(
            f"ppo.aggregation is {config.aggregation!r}: it must be role_sum or token_mean"
        )
    # A copy: the update donates its parameters.
    graph, params = nnx.split(copy_decoder(policy), nnx.Param)
    critic_graph, critic_params = nnx.split(Critic.from_policy(policy), nnx.Param)
    policy_adam, critic_adam = (
        _adam(lr, config, steps) for lr in (config.policy_lr, config.value_lr)
    )
    reference = nnx.split(copy_decoder(policy), nnx.Param)[1]
    trainer = Trainer(
        graph, critic_graph, policy_adam, critic_adam, config, layout, tuple(roles), temperature
    )
    models = Models(
        Learner(params, policy_adam.init(params)),
        Learner(critic_params, critic_adam.init(critic_params)),
        reference,
    )
    return trainer, models


def _adam(learning_rate: float, config: PPO, steps: int) -> optax.GradientTransformation:
    """Adam on a clipped gradient; cosine to a tenth over the run (C-3PO, App. A.1)."""
    total = max(steps * config.epochs * config.minibatches, 1)
    schedule = optax.cosine_decay_schedule(learning_rate, total, alpha=0.1)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(schedule))


def update(
    trainer: Trainer,
    models: Models,
    groups: Sequence[Group],
    credit_N: np.ndarray,
    sampled: Mapping[int, Sequence[float]],
    rng: random.Random,
) -> tuple[Models, dict[str, float]]:
    """Scores the groups, fixes their targets, and takes `epochs * minibatches` optimizer steps.

    Args:
      groups: sibling actions, see `batch.groups_of`.
      credit_N: float32 credit of each node.
      sampled: the sampler's log-probabilities by node, compared with the scores in the metrics.
      rng: splits the groups into minibatches.

    Without groups nothing changes.
    """
    if not groups:
        return models, {}
    parts = _split(groups, trainer, rng)
    flat = [rows for part in parts for rows in part]
    targets, metrics = _targets(trainer, models, parts, credit_N)
    metrics |= sampler_gap(flat, targets, sampled)
    sums: dict[str, float] = {}
    for _ in range(trainer.config.epochs):
        start = 0
        for part in parts:
            chosen = targets[start : start + len(part)]
            start += len(part)
            models, seen = _optimize(trainer, models, part, chosen)
            sums = {k: sums.get(k, 0.0) + v for k, v in seen.items()}
    steps = trainer.config.epochs * len(parts)
    tokens = max(sums.pop("tokens", 0.0), 1.0)
    for name in ("clip_frac", "entropy"):
        metrics[name] = sums.pop(name, 0.0) / tokens
    return models, metrics | {k: v / steps for k, v in sums.items()}


def _split(groups: Sequence[Group], trainer: Trainer, rng: random.Random) -> list[list[Rows]]:
    """Random minibatches of groups, each laid out as batches of rows on the device."""
    mixed = shuffled(rng, groups)
    count = min(trainer.config.minibatches, len(mixed))
    parts = [mixed[i::count] for i in range(count)]
    return [[jax.device_put(r) for r in lay_out(p, trainer.roles, trainer.layout)] for p in parts]


def _targets(
    trainer: Trainer, models: Models, parts: Sequence[Sequence[Rows]], credit_N: np.ndarray
) -> tuple[list[Targets], dict[str, float]]:
    """The targets of every batch; advantages are whitened over all of them together."""
    flat = [rows for part in parts for rows in part]
    heat = jax.device_put(np.float32(trainer.temperature))
    graph, params = trainer.policy_graph, models.policy.params
    scored = [
        (
            score(graph, params, rows, heat),
            score(graph, models.reference, rows, heat),
            assess(trainer.critic_graph, models.critic.params, rows),
        )
        for rows in flat
    ]
    logp, ref, value = (np.concatenate(x) for x in zip(*jax.device_get(scored), strict=True))
    host = jax.device_get(flat)
    mask = np.concatenate([rows.mask_AT for rows in host])
    node = np.concatenate([rows.node_A for rows in host])
    weight = np.concatenate([w for part in parts for w in token_weights(part, trainer)])
    credit = np.where(node >= 0, credit_N[node], 0.0).astype(np.float32)
    arrays = [_padded(x) for x in (logp, ref, value, credit, mask, weight)]
    c = trainer.config
    targets = ppo_targets(
        *jax.device_put(arrays),
        jax.device_put(np.float32(c.kl_coefficient)),
        gamma=c.gamma,
        lam=c.lam,
        whitened=c.whiten,
    )
    bounds = np.cumsum([0] + [len(rows.node_A) for rows in host])
    spans = [slice(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    whole = jax.device_get(targets)
    split = [jax.device_put(Targets(*(x[span] for x in whole))) for span in spans]
    count = max(mask.sum(), 1)
    return split, {
        "kl/mean": float((logp - ref)[mask].sum() / count),
        "response_length/mean": float(count / max((node >= 0).sum(), 1)),
        "value/mean": float(value[mask].sum() / count),
    }


def token_weights(part: Sequence[Rows], trainer: Trainer) -> list[np.ndarray]:
    """A weight a token, float32 `[A, T]`: weighted sums over a minibatch are its means."""
    host = [(np.asarray(r.mask_AT), np.asarray(r.role_A)) for r in jax.device_get(list(part))]
    if trainer.config.aggregation == "token_mean":
        total = max(sum(int(mask.sum()) for mask, _ in host), 1)
        return [mask.astype(np.float32) / np.float32(total) for mask, _ in host]
    count = len(trainer.roles)
    tokens = np.zeros(count)
    for mask_AT, role_A in host:
        np.add.at(tokens, role_A, mask_AT.sum(axis=1))
    scale = (1.0 / np.maximum(tokens, 1)).astype(np.float32)
    return [mask_AT * scale[role_A][:, None] for mask_AT, role_A in host]


def _padded(x: np.ndarray, multiple: int = 256) -> np.ndarray:
    """Rows of zeros up to a multiple, so that few shapes are compiled."""
    missing = -len(x) % multiple
    return np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))


def _optimize(
    trainer: Trainer, models: Models, part: Sequence[Rows], targets: Sequence[Targets]
) -> tuple[Models, dict[str, float]]:
    """One optimizer step of policy and critic on a minibatch, its gradients summed exactly."""
    c = trainer.config
    heat = jax.device_put(np.float32(trainer.temperature))
    policy = critic = None
    for rows, target in zip(part, targets, strict=True):
        params = models.policy.params
        one = policy_gradient(trainer.policy_graph, params, rows, target, heat, eps=c.clip)
        policy = one if policy is None else add(policy, one)
        params = models.critic.params
        one = value_gradient(trainer.critic_graph, params, rows, target, clip=c.value_clip)
        critic = one if critic is None else add(critic, one)
    assert policy is not None and critic is not None, "a minibatch has at least one batch"
    learner, stepped = apply(trainer.policy_optimizer, models.policy, policy[0])
    value, valued = apply(trainer.critic_optimizer, models.critic, critic[0])
    seen = policy[1] | critic[1] | stepped | {"value/grad_norm": valued["grad_norm"]}
    metrics = {k: float(v) for k, v in jax.device_get(seen).items()}
    return models._replace(policy=learner, critic=value), metrics


def sampler_gap(
    flat: Sequence[Rows], targets: Sequence[Targets], sampled: Mapping[int, Sequence[float]]
) -> dict[str, float]:
    """The largest difference between a token's score and the sampler's own log-probability."""
    worst = 0.0
    for rows, target in zip(jax.device_get(list(flat)), jax.device_get(list(targets)), strict=True):
        for node, logps in zip(rows.node_A.tolist(), target.old_logp_AT, strict=True):
            if node in sampled:
                gap = np.abs(logps[: len(sampled[node])] - np.asarray(sampled[node], np.float32))
                worst = max(worst, float(gap.max()))
    return {"sampler_gap/max": worst}
