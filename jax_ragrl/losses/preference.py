"""Losses of pairs of answers of which one is preferred."""

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
    """Direct preference optimisation of each pair, float32 `[B]`.

      L = -log sigmoid(beta ((chosen - ref_chosen) - (rejected - ref_rejected)))

    Rafailov et al. 2023, eq. 7. Each input is the log-probability of a whole answer: the sum over
    its tokens, and not the mean.
    """
    chex.assert_equal_shape([chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp])
    margin = (chosen_logp - ref_chosen_logp) - (rejected_logp - ref_rejected_logp)
    return -jax.nn.log_sigmoid(beta * margin)
