"""Advantages: rewards compared with the expected reward.

`Objective.advantage` names a *group rule*: a function from the rewards of a group, `[K]`, NumPy or
JAX, at least two of them, to their advantages. `credit.assign` says what a group is.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jax_ragrl.types import Tensor


def group_centred(reward_K: Tensor) -> Tensor:
    """Subtracts the mean of the group from each reward.

      A(i) = R(i) - mean of R

    OPERA (MAPGRPO), eq. 2. Without a division, advantages keep the scale of the rewards.
    """
    # Subtract the lowest reward of the group first: equal rewards then give exactly zero.
    above_K = reward_K - reward_K.min()
    return above_K - above_K.sum() / len(reward_K)


def group_normalised(reward_K: Tensor) -> Tensor:
    """Divides `group_centred` by the unbiased standard deviation of the group.

      A(i) = (R(i) - mean of R) / (std of R + 1e-6)

    Shao et al. 2024 (GRPO), with CoDA's constants. A departure from CoDA's code: equal rewards give
    exactly 0, not a rounding error divided by 1e-6.
    """
    centred_K = group_centred(reward_K)
    # Unbiased: GRPO divides by n - 1.
    variance_1 = (centred_K**2).sum(keepdims=True) / (len(reward_K) - 1)
    return centred_K / (variance_1**0.5 + 1e-6)


def above_mean(reward_K: Tensor) -> Tensor:
    """Keeps what of `group_centred` is above 0.

      A(i) = max(R(i) - mean of R, 0)

    Oh et al. 2018 (self-imitation learning), eq. 2, with the mean of the group as the value. For
    forced actions, whose advantage counts whatever their probability: an action that loses is
    pushed down without a bound, also at the expense of others that share its tokens, whereas
    imitation of those that win has an optimum.
    """
    return group_centred(reward_K).clip(0)


def best_of_group(reward_K: Tensor) -> Tensor:
    """Gives 1 to the actions with the highest reward of the group, and 0 to the others.

      A(i) = 1 if R(i) = max of R > mean of R, otherwise 0

    With the policy gradient this is imitation of the policy's own best rollouts, once per batch
    (Dong et al. 2023 (RAFT); Anthony et al. 2017 (expert iteration)). Equal rewards teach nothing.
    """
    above_K = group_centred(reward_K)
    return ((above_K == above_K.max()) & (above_K > 0)).astype(reward_K.dtype)


def leave_one_out(reward_K: Tensor) -> Tensor:
    """Subtracts from each reward the mean of the *other* rewards.

      A(i) = R(i) - mean of R(j) over j != i = (R(i) - mean of R) n / (n - 1)

    Ahmadian et al. 2024 (RLOO).
    """
    return group_centred(reward_K) * len(reward_K) / (len(reward_K) - 1)


def whiten(x: Array, mask: Array) -> Array:
    """Scales `x`, of any shape, to mean 0 and standard deviation 1 over `mask`; 0 elsewhere."""
    count = jnp.maximum(jnp.sum(mask, dtype=x.dtype), 1)
    mean = jnp.sum(x, where=mask) / count
    variance = jnp.sum(jnp.square(x - mean), where=mask) / count
    return jnp.where(mask, (x - mean) / jnp.sqrt(variance + 1e-8), 0.0)
