"""What a rollout fixes for its update: advantages, returns and weights, a number a token."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.credit.advantages import whiten
from jax_ragrl.credit.returns import gae_over_turns
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.losses import kl_k1, kl_k2, kl_k3, truncated_importance_weight
from jax_ragrl.types import Tensor

KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


class Targets(NamedTuple):
    """What the losses of scored tokens need, float32 `[R, M]` each; None where nothing reads it.

    `weight` and `value_weight` make weighted sums over a minibatch its aggregates.
    """

    advantage: Tensor
    weight: Tensor
    old_logp: Tensor = None
    ref_logp: Tensor = None
    old_value: Tensor = None
    returns: Tensor = None
    value_weight: Tensor = None


class Scored(NamedTuple):
    """Actions as the models saw them before the update: float32 `[A, T]`, `credit_A`, `mask_AT`.

    `path_CS` are the conversations that GAE runs over, see `gae_over_turns`: each action in one of
    its own where it runs over turns. `behaviour_AT` are the sampler's own log-probabilities, equal
    to `logp_AT` where it gave none. What was not scored is None; `entropy_AT` is for the metrics.
    """

    mask_AT: Tensor
    credit_A: Tensor
    path_CS: Tensor
    logp_AT: Tensor = None
    ref_logp_AT: Tensor = None
    value_AT: Tensor = None
    behaviour_AT: Tensor = None
    entropy_AT: Tensor = None


@functools.partial(jax.jit, static_argnames="objective")
def credited(
    objective: Objective, scored: Scored, kl_coefficient: Array
) -> tuple[Array, Array, Array]:
    """Advantages, returns and importance weights of actions, float32 `[A, T]` each.

    A token's reward is its share of the KL penalty, and at its action's last token the action's
    number. With a critic the advantage is GAE of those rewards, and the return is `A + V` with the
    advantage before whitening (Chen et al. 2025, app. A.1). Without one it is the reward to go,
    which is the action's number at every token where the reward holds no KL.
    """
    o, mask_AT = objective, scored.mask_AT
    last_AT = mask_AT & ~jnp.roll(mask_AT, -1, axis=1).at[:, -1].set(False)
    reward_AT = jnp.where(last_AT, scored.credit_A[:, None], 0.0)
    if o.kl.where in ("reward", "terminal"):
        penalty_AT = _penalty(o.kl, scored, last_AT)
        reward_AT = reward_AT - kl_coefficient * penalty_AT
    value_AT = jnp.zeros_like(reward_AT) if scored.value_AT is None else scored.value_AT
    gamma, lam = (1.0, 1.0) if o.critic == "none" else (o.gamma, o.lam)
    paths = (mask_AT, scored.path_CS)
    advantage_AT = gae_over_turns(reward_AT, value_AT, *paths, gamma=gamma, lam=lam)
    return_AT = advantage_AT + jnp.where(mask_AT, value_AT, 0.0)
    if o.advantage == "whitened_gae":
        advantage_AT = whiten(advantage_AT, mask_AT)
    return advantage_AT, return_AT, _importance(o, scored)


def _penalty(kl: KL, scored: Scored, last_AT: Array) -> Array:
    estimate = KL_ESTIMATORS[kl.estimator]
    kl_AT = estimate(scored.logp_AT, scored.ref_logp_AT, scored.mask_AT)
    if kl.where == "reward":
        return kl_AT
    return jnp.where(last_AT, jnp.sum(kl_AT, axis=1, keepdims=True), 0.0)


def _importance(o: Objective, scored: Scored) -> Array:
    if not o.stale_cap:
        return scored.mask_AT.astype(jnp.float32)
    return truncated_importance_weight(
        scored.behaviour_AT, scored.logp_AT, scored.mask_AT, cap=o.stale_cap
    )
