"""Estimates of KL(policy | reference) from sampled tokens (Schulman 2020, "Approximating KL").

As numbers in a reward, k1 and k3 are unbiased. As losses on tokens that the policy sampled, they
differ in their mean gradient: the mean gradient of k1 is 0, so it has no effect; that of k2 is the
gradient of KL(policy | reference) of the token given its prefix; that of k3 is the gradient of
KL(reference | policy), the same to first order if policy and reference are close.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jax import Array


def kl_k1(logp: Array, ref_logp: Array, mask: Array) -> Array:
    """The log-ratio `logp - ref_logp`: unbiased, of either sign.

    Args:
      logp: float32 log-probability of each token under the policy, in nats.
      ref_logp: float32 log-probability under the reference; all arrays have one shape.
      mask: bool; the estimate is 0 at False, and the other arrays may hold any value there.
    """
    chex.assert_equal_shape([logp, ref_logp, mask])
    return jnp.where(mask, logp - ref_logp, 0.0)


def kl_k2(logp: Array, ref_logp: Array, mask: Array) -> Array:
    """Half the squared log-ratio: never negative, biased, of low variance.

    Args:
      logp, ref_logp, mask: as in `kl_k1`.
    """
    return 0.5 * jnp.square(kl_k1(logp, ref_logp, mask))


def kl_k3(logp: Array, ref_logp: Array, mask: Array, *, clamp: float = 10.0) -> Array:
    """The unbiased estimate that is never negative.

      k3 = min(exp(d) - 1 - d, clamp),   d = ref_logp - logp

    Shao et al. 2024 (GRPO), eq. 4. The bound is on the estimate, as in the verl code that CoDA
    builds on: a token that has moved too far contributes `clamp` and has no gradient.

    Args:
      logp, ref_logp, mask: as in `kl_k1`.
      clamp: the upper bound of the estimate, in nats.
    """
    # Past clamp + 1 on either side the estimate exceeds the clamp, so this bound changes no value:
    # it keeps exp finite, whose overflow would turn a zero cotangent into a nan.
    d = jnp.clip(-kl_k1(logp, ref_logp, mask), -(clamp + 1), clamp + 1)
    return jnp.minimum(jnp.exp(d) - 1 - d, clamp)
