"""Losses: functions from arrays to one number per token, 0 outside the mask. No model, no config.

Aggregation is one weight per token (`weights`): `sum(weights * loss)` over any split of a minibatch
is exact.
"""

from jax_ragrl.losses.divergence import kl_k1, kl_k2, kl_k3
from jax_ragrl.losses.policy import (
    clipped_policy_loss,
    dual_clipped_policy_loss,
    policy_gradient_loss,
    truncated_importance_weight,
)
from jax_ragrl.losses.preference import dpo_loss
from jax_ragrl.losses.value import clipped_value_loss, value_loss
from jax_ragrl.losses.weights import role_sum_weights, sequence_mean_weights, token_mean_weights

__all__ = [
    "clipped_policy_loss",
    "clipped_value_loss",
    "dpo_loss",
    "dual_clipped_policy_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "policy_gradient_loss",
    "role_sum_weights",
    "sequence_mean_weights",
    "token_mean_weights",
    "truncated_importance_weight",
    "value_loss",
]
