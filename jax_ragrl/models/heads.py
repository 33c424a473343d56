"""Value heads, and the two kinds of critics: a separate decoder, or a head on the policy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_ragrl.models.decoder import Decoder


class ValueHead(nnx.Module):
    """A linear map from hidden states `[..., D]` to values `[...]`, float32; zero at first."""

    def __init__(self, width: int):
        self.kernel = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((), jnp.float32))

    def __call__(self, hidden: Array) -> Array:
        # By default a TPU multiplies in bfloat16 and a GPU with ten bits. Full precision costs
        # little here, because the kernel is a single column.
        exact = jax.lax.Precision.HIGHEST
        wide = hidden.astype(jnp.float32)
        value = jnp.tensordot(wide, self.kernel[...], axes=1, precision=exact)
        return value + self.bias[...]


class Critic(nnx.Module):
    """A separate decoder with a value head, without a language model head."""

    def __init__(self, trunk: Decoder):
        self.trunk = without_lm_head(trunk)
        self.head = ValueHead(trunk.config.hidden_size)


class ActorCritic(nnx.Module):
    """A policy and a value head on the same trunk."""

    def __init__(self, policy: Decoder):
        self.policy = policy
        self.head = ValueHead(policy.config.hidden_size)


def without_lm_head(decoder: Decoder) -> Decoder:
    """Returns a decoder with the same arrays but no `lm_head`, which values do not need.

    At 8 billion parameters the head and its optimizer moments take 6 GB.
    """
    trunk = nnx.merge(*nnx.split(decoder))
    if not trunk.config.tie_embeddings:
        # A config with tied embeddings is the one that has no `lm_head`.
        trunk.config = dataclasses.replace(trunk.config, tie_embeddings=True)
        del trunk.lm_head
    return trunk
