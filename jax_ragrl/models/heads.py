"""Value heads: what a critic adds to a decoder."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_ragrl.models.decoder import Decoder


class ValueHead(nnx.Module):
    """A linear map from hidden states `[..., D]` to values `[...]`, float32.

    It begins at zero, so that an untrained critic claims nothing and its advantage is the return.
    """

    def __init__(self, width: int):
        self.kernel = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((), jnp.float32))

    def __call__(self, hidden: Array) -> Array:
        # By default a TPU would round both to bfloat16, a GPU to ten bits: this is one column.
        exactly = jax.lax.Precision.HIGHEST
        wide = hidden.astype(jnp.float32)
        value = jnp.tensordot(wide, self.kernel[...], axes=1, precision=exactly)
        return value + self.bias[...]


class Critic(nnx.Module):
    """A decoder of its own with a value head, and without one for tokens."""

    def __init__(self, trunk: Decoder):
        self.trunk = headless(trunk)
        self.head = ValueHead(trunk.config.hidden_size)

    def __call__(self, ids_BL: Array, positions_BL: Array, seen: Array | None) -> Array:
        """Values, float32 `[B, L]`; arguments as for `Decoder`."""
        return self.head(self.trunk(ids_BL, positions_BL, seen)[0])


class ActorCritic(nnx.Module):
    """A policy and a value head on the same trunk: one forward gives hidden states and values."""

    def __init__(self, policy: Decoder):
        self.policy = policy
        self.head = ValueHead(policy.config.hidden_size)

    def __call__(
        self, ids_BL: Array, positions_BL: Array, seen: Array | None
    ) -> tuple[Array, Array]:
        """Hidden states `[B, L, D]` and values, float32 `[B, L]`."""
        hidden_BLD, _ = self.policy(ids_BL, positions_BL, seen)
        return hidden_BLD, self.head(hidden_BLD)


def headless(decoder: Decoder) -> Decoder:
    """The decoder's own arrays without an `lm_head`, which values do not need: at 8 billion
    parameters it and its moments are 6 GB."""
    trunk = nnx.merge(*nnx.split(decoder))
    if not trunk.config.tie_embeddings:
        trunk.config = dataclasses.replace(trunk.config, tie_embeddings=True)
        del trunk.lm_head
    return trunk
