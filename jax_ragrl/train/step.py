"""The train step, pure: score rows, turn credit into targets, sum gradients, apply them.

Losses never see a model. Aggregation is a weight a token: the caller divides by what it averages
over, so sums over any split of a batch into parts are exact.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jax_ragrl.batch import Rows, grouped_mask
from jax_ragrl.credit.advantages import whiten
from jax_ragrl.credit.returns import gae
from jax_ragrl.losses import clipped_policy_loss, clipped_value_loss, kl_k1

SCORED_TOKENS = 2048  # logits held at once, in tokens: [tokens, V] of a whole batch never exists


class Learner(NamedTuple):
    """One trained model: parameters and optimizer state."""

    params: Any
    opt_state: Any


class Targets(NamedTuple):
    """What a rollout fixes for the update, float32 `[A, T]`: 0 where masked."""

    old_logp_AT: Array
    advantage_AT: Array
    old_value_AT: Array
    return_AT: Array
    weight_AT: Array


@functools.partial(jax.jit, static_argnames="graph")
def score(graph: Any, params: Any, rows: Rows, temperature: Array) -> Array:
    """Log-probabilities of the actions' tokens at the sampling temperature, float32 `[A, T]`."""
    return token_scores(nnx.merge(graph, params), rows, temperature)[0]


@functools.partial(jax.jit, static_argnames="graph")
def assess(graph: Any, params: Any, rows: Rows) -> Array:
    """A critic's value of the state before each token, float32 `[A, T]`; 0 where masked."""
    return _values(nnx.merge(graph, params), rows)


def token_scores(model: Any, rows: Rows, temperature: Array) -> tuple[Array, Array]:
    """Log-probability and entropy of each action token, float32 `[A, T]`; 0 where masked.

    Hidden states are gathered at the places that predict an action's token before the head is
    applied, in chunks whose logits are recomputed in the backward pass.
    """
    hidden_RLD, _ = model(rows.ids_RL, rows.positions_RL, grouped_mask(rows.segments_RL))
    hidden_ATD = hidden_RLD[rows.row_A[:, None], rows.source_AT]
    shape, width = rows.target_AT.shape, hidden_ATD.shape[-1]
    count = rows.target_AT.size
    chunk = next(c for c in range(min(count, SCORED_TOKENS), 0, -1) if count % c == 0)

    @jax.checkpoint
    def head(part: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden_CD, target_C = part
        logps_CV = jax.nn.log_softmax(model.logits(hidden_CD) / temperature, axis=-1)
        logp_C = jnp.take_along_axis(logps_CV, target_C[:, None], axis=1)[:, 0]
        return logp_C, -jnp.sum(jnp.exp(logps_CV) * logps_CV, axis=-1)

    parts = (hidden_ATD.reshape(-1, chunk, width), rows.target_AT.reshape(-1, chunk))
    logp, entropy = jax.lax.map(head, parts)
    return tuple(jnp.where(rows.mask_AT, x.reshape(shape), 0.0) for x in (logp, entropy))  # type: ignore[return-value]


def _values(critic: Any, rows: Rows) -> Array:
    value_RL, _ = critic(rows.ids_RL, rows.positions_RL, grouped_mask(rows.segments_RL))
    return jnp.where(rows.mask_AT, value_RL[rows.row_A[:, None], rows.source_AT], 0.0)


@functools.partial(jax.jit, static_argnames=("gamma", "lam", "whitened"))
def ppo_targets(
    logp_AT: Array,
    ref_logp_AT: Array,
    value_AT: Array,
    credit_A: Array,
    mask_AT: Array,
    weight_AT: Array,
    kl_coefficient: Array,
    *,
    gamma: float,
    lam: float,
    whitened: bool,
) -> Targets:
    """Token rewards, advantages and returns of whole actions.

    The reward of a token is `-kl_coefficient * (logp - ref_logp)`, and the node's credit is added
    at its last token (C-3PO section 5.3; placement of the KL as in OpenRLHF, assumed). Returns are
    `A + V` with the advantage before whitening.
    """
    last_AT = mask_AT & ~jnp.roll(mask_AT, -1, axis=1).at[:, -1].set(False)
    credit_AT = jnp.where(last_AT, credit_A[:, None], 0.0)
    reward_AT = credit_AT - kl_coefficient * kl_k1(logp_AT, ref_logp_AT, mask_AT)
    estimate = functools.partial(gae, gamma=gamma, lam=lam)
    advantage_AT = jax.vmap(estimate)(reward_AT, value_AT, mask_AT)
    return_AT = advantage_AT + value_AT
    if whitened:
        advantage_AT = whiten(advantage_AT, mask_AT)
    return Targets(logp_AT, advantage_AT, value_AT, return_AT, weight_AT)


@functools.partial(jax.jit, static_argnames=("graph", "eps"))
def policy_gradient(
    graph: Any, params: Any, rows: Rows, targets: Targets, temperature: Array, *, eps: float
) -> tuple[Any, dict[str, Array]]:
    """The gradient of the weighted clipped policy loss, and weighted sums of its metrics."""

    def loss_of(params: Any) -> tuple[Array, dict[str, Array]]:
        logp_AT, entropy_AT = token_scores(nnx.merge(graph, params), rows, temperature)
        t = targets
        loss_AT = clipped_policy_loss(
            logp_AT, t.old_logp_AT, t.advantage_AT, rows.mask_AT, eps_low=eps, eps_high=eps
        )
        ratio_AT = jnp.exp(jnp.where(rows.mask_AT, logp_AT - t.old_logp_AT, 0.0))
        metrics = {
            "loss/policy": jnp.sum(loss_AT * t.weight_AT),
            "clip_frac": _count(jnp.abs(ratio_AT - 1) > eps, rows),
            "entropy": jnp.sum(entropy_AT),
            "tokens": jnp.sum(rows.mask_AT, dtype=jnp.float32),
        }
        return metrics["loss/policy"], metrics

    return jax.grad(loss_of, has_aux=True)(params)


@functools.partial(jax.jit, static_argnames=("graph", "clip"))
def value_gradient(
    graph: Any, params: Any, rows: Rows, targets: Targets, *, clip: float
) -> tuple[Any, dict[str, Array]]:
    """The gradient of the weighted clipped value loss, and its weighted sum."""

    def loss_of(params: Any) -> tuple[Array, dict[str, Array]]:
        value_AT = _values(nnx.merge(graph, params), rows)
        t = targets
        loss_AT = clipped_value_loss(value_AT, t.old_value_AT, t.return_AT, rows.mask_AT, clip=clip)
        loss = jnp.sum(loss_AT * t.weight_AT)
        return loss, {"loss/value": loss}

    return jax.grad(loss_of, has_aux=True)(params)


def _count(flags_AT: Array, rows: Rows) -> Array:
    return jnp.sum(flags_AT & rows.mask_AT, dtype=jnp.float32)


@jax.jit
def add(a: Any, b: Any) -> Any:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, a, b)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="learner")
def apply(
    optimizer: optax.GradientTransformation, learner: Learner, grads: Any
) -> tuple[Learner, dict[str, Array]]:
    """One optimizer step; a gradient that is not finite is skipped and counted."""
    norm = optax.global_norm(grads)
    updates, opt_state = optimizer.update(grads, learner.opt_state, learner.params)
    stepped = Learner(optax.apply_updates(learner.params, updates), opt_state)
    finite = jnp.isfinite(norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, learner)
    return kept, {"grad_norm": norm, "skipped": jnp.where(finite, 0.0, 1.0)}
