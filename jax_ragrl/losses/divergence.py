"""Estimates of KL(policy | reference) from sampled tokens (Schulman 2020, "Approximating KL").

As numbers, which is what a reward needs, k1 and k3 are unbiased. As losses on tokens that the
policy sampled they differ in another way: the mean gradient of k1 is 0, so it pulls nowhere; that
of k2 is the gradient of KL(policy | reference) of the token, given what stands before it; that of
k3 is the gradient of KL(reference | policy), the same to first order where the two are near.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jax import Array


def kl_k1(logp: Array, ref_logp: Array, mask: Array) -> Array:
    """The log-ratio `logp - ref_logp`: unbiased, of either sign; 0 where `mask` is False."""
    chex.assert_equal_shape([logp, ref_logp, mask])
    return jnp.where(mask, logp - ref_logp, 0.0)


def kl_k2(logp: Array, ref_logp: Array, mask: Array) -> Array:
    """Half the squared log-ratio: never negative, biased, of low variance; 0 where masked."""
    return 0.5 * jnp.square(kl_k1(logp, ref_logp, mask))


def kl_k3(logp: Array, ref_logp: Array, mask: Array, *, clamp: float = 10.0) -> Array:
    """The unbiased estimate that is never negative; 0 where `mask` is False.

      k3 = min(exp(d) - 1 - d, clamp),   d = ref_logp - logp

    Shao et al. 2024 (GRPO), eq. 4. The bound is on the estimate, as in the verl code that CoDA
    builds on: a token that has moved too far weighs `clamp` and has no gradient.
    """
    # Past clamp + 1 on either side the estimate exceeds the clamp, so this bound changes no value:
    # it keeps exp finite, whose overflow would turn a zero cotangent into a nan.
    d = jnp.clip(-kl_k1(logp, ref_logp, mask), -(clamp + 1), clamp + 1)
    return jnp.minimum(jnp.exp(d) - 1 - d, clamp)
