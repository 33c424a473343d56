"""Losses: arrays in, a scalar (or one number a token) out. No model, no config."""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jax import Array


def clipped_policy_loss(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, *, eps: float = 0.2
) -> Array:
    """PPO's clipped surrogate of each token; 0 where `mask` is False.

      L = -min(r A, clip(r, 1 - eps, 1 + eps) A),   r = exp(logp - old_logp)

    Schulman et al. 2017, eq. 7. All arrays have one shape; what is masked may hold anything.
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask])
    # Mask before exp: a nan multiplied by a zero cotangent is still a nan.
    ratio = jnp.exp(jnp.where(mask, logp - old_logp, 0.0))
    advantage = jnp.where(mask, advantage, 0.0)
    clipped = jnp.clip(ratio, 1 - eps, 1 + eps)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def clipped_value_loss(
    value: Array, old_value: Array, target: Array, mask: Array, *, clip: float = 0.2
) -> Array:
    """Half the larger squared error of the value and its clipped self; 0 where masked.

      L = max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2) / 2

    Schulman et al. 2017, as in the authors' published implementation.
    """
    chex.assert_equal_shape([value, old_value, target, mask])
    value, old_value, target = (jnp.where(mask, x, 0.0) for x in (value, old_value, target))
    near = old_value + jnp.clip(value - old_value, -clip, clip)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(near - target))


def kl_k1(logp: Array, ref_logp: Array, mask: Array) -> Array:
    """The log-ratio `logp - ref_logp`: an unbiased estimate of KL(policy | reference) a token."""
    return jnp.where(mask, logp - ref_logp, 0.0)


def mean_over(x: Array, mask: Array) -> Array:
    """The mean of what `mask` keeps; 0 where it keeps nothing."""
    return jnp.sum(x, where=mask) / jnp.maximum(jnp.sum(mask, dtype=x.dtype), 1)


def role_sum(x_RT: Array, role_RT: Array, mask_RT: Array, num_roles: int) -> Array:
    """The sum over roles of each role's token mean (C-3PO, App. A.1: PPO summed over agents)."""
    means = [mean_over(x_RT, mask_RT & (role_RT == role)) for role in range(num_roles)]
    return jnp.sum(jnp.stack(means))
