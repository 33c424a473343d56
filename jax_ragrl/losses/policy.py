"""Policy losses: what pushes the probability of a token towards its advantage."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax import Array

WIDEST = 20.0  # nats: exp of a float32 log-ratio overflows at 88, and its gradient is then a nan


def clipped_policy_loss(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Array:
    """PPO's clipped surrogate of each token; 0 where `mask` is False.

      L = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A),   r = exp(logp - old_logp)

    Schulman et al. 2017, eq. 7; an `eps_high` above `eps_low` is the clip-higher of Yu et al. 2025
    (DAPO), eq. 8. All arrays have one shape; what is masked may hold anything. A log-ratio counts
    as at most 20 nats in size.
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask])
    ratio = _ratio(logp, old_logp, mask)
    advantage = jnp.where(mask, advantage, 0.0)
    clipped = jnp.clip(ratio, 1 - eps_low, 1 + eps_high)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def dual_clipped_policy_loss(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual: float = 3.0,
) -> Array:
    """PPO's clipped surrogate, bounded for negative advantages too; 0 where `mask` is False.

      L = -max(min(r A, clip(r) A), dual A) where A < 0, and PPO's loss elsewhere; dual > 1

    Ye et al. 2020, eq. 5: without the bound a token that became likely and turned out bad has a
    loss that grows with its ratio. Arguments as in `clipped_policy_loss`.
    """
    loss = clipped_policy_loss(logp, old_logp, advantage, mask, eps_low=eps_low, eps_high=eps_high)
    advantage = jnp.where(mask, advantage, 0.0)
    return jnp.where(advantage < 0, jnp.minimum(loss, -dual * advantage), loss)


def policy_gradient_loss(logp: Array, advantage: Array, mask: Array) -> Array:
    """The loss whose gradient is REINFORCE's; 0 where `mask` is False.

      L = -A logp

    OPERA (MAPGRPO), eq. 3: no ratio and no clip, so it is right for one step on fresh samples only.
    """
    chex.assert_equal_shape([logp, advantage, mask])
    return -jnp.where(mask, advantage, 0.0) * jnp.where(mask, logp, 0.0)


def truncated_importance_weight(
    behaviour_logp: Array, old_logp: Array, mask: Array, *, cap: float = 2.0
) -> Array:
    """How much a token counts that another policy sampled; 0 where `mask` is False.

      w = min(exp(old_logp - behaviour_logp), cap)

    `behaviour_logp` is what the sampler reported, `old_logp` what the learner scored before its
    update; the loss of a stale or differently computed rollout is multiplied by `w`, which carries
    no gradient. Ionides 2008; for language models Yao et al. 2025.
    """
    chex.assert_equal_shape([behaviour_logp, old_logp, mask])
    weight = jnp.minimum(_ratio(old_logp, behaviour_logp, mask), cap)
    return jax.lax.stop_gradient(jnp.where(mask, weight, 0.0))


def _ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    # Mask before exp: a nan multiplied by a zero cotangent is still a nan.
    return jnp.exp(jnp.clip(jnp.where(mask, logp - old_logp, 0.0), -WIDEST, WIDEST))
