"""Losses on pairs of a preferred and a rejected answer."""

from __future__ import annotations

import chex
import jax
from jax import Array


def dpo_loss(
    chosen_logp: Array,
    rejected_logp: Array,
    ref_chosen_logp: Array,
    ref_rejected_logp: Array,
    *,
    beta: float = 0.1,
) -> Array:
    """Computes the loss of direct preference optimization (DPO) per pair, float32 `[B]`.

      L = -log sigmoid(beta ((chosen - ref_chosen) - (rejected - ref_rejected)))

    Rafailov et al. 2023, eq. 7. Each log-probability is that of a whole answer: the sum over its
    tokens, not the mean.

    Args:
      chosen_logp, rejected_logp: float32 `[B]`, log-probabilities under the policy, in nats.
      ref_chosen_logp, ref_rejected_logp: float32 `[B]`, the same under the reference.
      beta: the inverse scale of the implicit reward.
    """
    chex.assert_equal_shape([chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp])
    margin = (chosen_logp - ref_chosen_logp) - (rejected_logp - ref_rejected_logp)
    # log_sigmoid does not overflow for large margins, unlike log(1 + exp(-x)).
    return -jax.nn.log_sigmoid(beta * margin)
