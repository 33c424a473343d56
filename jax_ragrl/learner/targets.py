"""Per-token training targets, computed once per rollout: advantages, returns and loss weights."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.credit.advantages import whiten
from jax_ragrl.credit.returns import gae_over_turns
from jax_ragrl.learner.objective import Objective
from jax_ragrl.losses import kl_k1, kl_k2, kl_k3, truncated_importance_weight
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.types import Tensor

KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


class Targets(NamedTuple):
    """Inputs of the losses per scored token, `[R, M]`, float32 but for `first`; None if not read.

    Fields:
      advantage: advantage of the token.
      weight: weight of its policy loss; a weighted sum over a minibatch is the aggregate loss.
      old_logp: log-probability under the policy before the update; None: equal to the current one.
      ref_logp: log-probability under the reference policy.
      old_value: value before the update.
      returns: target of the value.
      value_weight: weight of its value loss.
      first: int32, the place of the first token of its action among the scored tokens of the row.
    """

    advantage: Tensor
    weight: Tensor
    old_logp: Tensor = None
    ref_logp: Tensor = None
    old_value: Tensor = None
    returns: Tensor = None
    value_weight: Tensor = None
    first: Tensor = None


class ActionScores(NamedTuple):
    """Actions with the outputs of the models before the update; float32 `[A, T]` unless noted.

    Outputs that the objective does not need are None.

    Fields:
      mask_AT: bool, False beyond the end of an action.
      credit_A: `[A]`, the credit of each action.
      path_CS: int32 `[C, S]`, the conversations that GAE runs over (see `gae_over_turns`): one per
        action if GAE runs over single turns.
      logp_AT, ref_logp_AT: log-probabilities under the policy and under the reference.
      value_AT: values of the critic.
      behaviour_logp_AT: log-probabilities of the sampler; `logp_AT` if no sampler wrote the action.
      entropy_AT: entropies of the policy, for the metrics only.
    """

    mask_AT: Tensor
    credit_A: Tensor
    path_CS: Tensor
    logp_AT: Tensor = None
    ref_logp_AT: Tensor = None
    value_AT: Tensor = None
    behaviour_logp_AT: Tensor = None
    entropy_AT: Tensor = None


@in_order
@functools.partial(jax.jit, static_argnames="objective")
def compute_advantages(
    objective: Objective, scores: ActionScores, kl_coefficient: Array
) -> tuple[Array, Array, Array]:
    """Computes advantages, returns and importance weights of actions, float32 `[A, T]` each.

    The reward of a token is its part of the KL penalty; at the last token of an action the credit
    of the action is added. With a critic, the advantage is GAE of these rewards, and the return is
    `A + V` with the advantage before whitening (Chen et al. 2025, app. A.1). Without a critic, the
    advantage is the reward-to-go: the credit at every token, if no KL penalty is in the reward.
    """
    o, mask_AT = objective, scores.mask_AT
    # 1. Rewards.
    last_AT = mask_AT & ~jnp.roll(mask_AT, -1, axis=1).at[:, -1].set(False)
    reward_AT = jnp.where(last_AT, scores.credit_A[:, None], 0.0)
    if o.kl.where in ("reward", "terminal"):
        estimate = KL_ESTIMATORS[o.kl.estimator]
        penalty_AT = estimate(scores.logp_AT, scores.ref_logp_AT, mask_AT)
        if o.kl.where == "terminal":
            penalty_AT = jnp.where(last_AT, jnp.sum(penalty_AT, axis=1, keepdims=True), 0.0)
        reward_AT = reward_AT - kl_coefficient * penalty_AT
    # 2. GAE; with zero values and gamma = lambda = 1 it is the reward-to-go.
    value_AT = jnp.zeros_like(reward_AT) if scores.value_AT is None else scores.value_AT
    gamma, lam = (1.0, 1.0) if o.critic == "none" else (o.gamma, o.lam)
    advantage_AT = gae_over_turns(
        reward_AT, value_AT, mask_AT, scores.path_CS, gamma=gamma, lam=lam
    )
    return_AT = advantage_AT + jnp.where(mask_AT, value_AT, 0.0)
    # 3. Whitening, after the returns.
    if o.advantage == "whitened_gae":
        advantage_AT = whiten(advantage_AT, mask_AT)
    # 4. Importance weights.
    weight_AT = mask_AT.astype(jnp.float32)
    if o.importance_weight_cap:
        weight_AT = truncated_importance_weight(
            scores.behaviour_logp_AT, scores.logp_AT, mask_AT, cap=o.importance_weight_cap
        )
    return advantage_AT, return_AT, weight_AT
