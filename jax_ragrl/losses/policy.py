"""Policy losses: they raise the probability of tokens with positive advantage, and lower others.

`Objective.loss` names one of these functions, or one of your own; both get what they read by the
names of their parameters (`INPUTS`, and the fields of the objective).
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax import Array

# What a policy loss may read of each token: arrays of one shape, float32 but for `mask`, bool. Of
# the action that the token is part of: its number of tokens, and the mean over them of
# `logp - old_logp`, which has no gradient.
INPUTS = ("logp", "old_logp", "advantage", "mask", "action_size", "action_gap")
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
    """Computes PPO's clipped surrogate loss per token; 0 where `mask` is False.

      L = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A),   r = exp(logp - old_logp)

    Schulman et al. 2017, eq. 7; an `eps_high` above `eps_low` is the clip-higher of Yu et al. 2025
    (DAPO), eq. 8. Log-ratios are clipped to 20 nats in size.

    Args:
      logp: float32 log-probability of each token under the policy, in nats.
      old_logp: float32 log-probability before the update; all arrays have one shape.
      advantage: float32 advantage of each token, in units of the reward.
      mask: bool, the tokens to train; elsewhere the arrays may hold any value, nan included.
      eps_low: the ratio is clipped below at `1 - eps_low`.
      eps_high: the ratio is clipped above at `1 + eps_high`.
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask])
    ratio = _ratio(logp, old_logp, mask)
    advantage = jnp.where(mask, advantage, 0.0)
    clipped_ratio = jnp.clip(ratio, 1 - eps_low, 1 + eps_high)
    return -jnp.minimum(ratio * advantage, clipped_ratio * advantage)


def dual_clipped_policy_loss(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float = 3.0,
) -> Array:
    """Bounds PPO's clipped surrogate loss for negative advantages too; 0 where `mask` is False.

      L = -max(min(r A, clip(r) A), c A) if A < 0, and PPO's loss if A >= 0; c = dual_clip > 1

    Ye et al. 2020, eq. 5. Without the bound, the loss of a token that became likely and has a
    negative advantage grows with its ratio.

    Args:
      logp, old_logp, advantage, mask, eps_low, eps_high: as in `clipped_policy_loss`.
      dual_clip: the bound of the ratio for negative advantages, above 1.
    """
    # max(min(r A, clip(r) A), c A) is -min(loss, -c A) for a negative A.
    loss = clipped_policy_loss(logp, old_logp, advantage, mask, eps_low=eps_low, eps_high=eps_high)
    advantage = jnp.where(mask, advantage, 0.0)
    return jnp.where(advantage < 0, jnp.minimum(loss, -dual_clip * advantage), loss)


def policy_gradient_loss(logp: Array, advantage: Array, mask: Array) -> Array:
    """Computes the loss whose gradient is REINFORCE's; 0 where `mask` is False.

      L = -A logp

    OPERA (MAPGRPO), eq. 3. Without a ratio and a clip, it is correct only for one step on samples
    of the current policy.

    Args:
      logp: float32 log-probability of each token under the policy, in nats.
      advantage: float32 advantage of each token.
      mask: bool, the tokens to train.
    """
    chex.assert_equal_shape([logp, advantage, mask])
    return -jnp.where(mask, advantage, 0.0) * jnp.where(mask, logp, 0.0)


def truncated_importance_weight(
    behaviour_logp: Array, old_logp: Array, mask: Array, *, cap: float = 2.0
) -> Array:
    """Computes the weight of tokens that another policy sampled; 0 where `mask` is False.

      w = min(exp(old_logp - behaviour_logp), cap)

    The loss of a stale rollout, or of one that the sampler computed with other numerics, is
    multiplied by `w`, which has no gradient. Ionides 2008; for language models Yao et al. 2025.

    Args:
      behaviour_logp: float32 log-probability that the sampler reported, in nats.
      old_logp: float32 log-probability that the learner computed before its update.
      mask: bool, the tokens to train.
      cap: the largest weight.
    """
    chex.assert_equal_shape([behaviour_logp, old_logp, mask])
    weight = jnp.minimum(_ratio(old_logp, behaviour_logp, mask), cap)
    return jax.lax.stop_gradient(jnp.where(mask, weight, 0.0))


def _ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    # Mask before exp: a nan multiplied by a zero cotangent is still a nan.
    return jnp.exp(jnp.clip(jnp.where(mask, logp - old_logp, 0.0), -WIDEST, WIDEST))
