"""Credit: a forest and the rewards of its leaves become one number a node."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def monte_carlo(
    parent_N: Array, leaf_N: Array, reward_N: Array, weight_N: Array
) -> tuple[Array, Array]:
    """The mean reward of the leaves that can be reached from each node.

      value(n) = sum_l w(n -> l) R(l) / sum_l w(n -> l)

    where `w` is the product of `weight_N` below `n` on the way to leaf `l` (all ones: the plain
    mean). Chen et al. 2025 (C-3PO), eq. 5. One reverse pass: every child comes after its parent.

    Args:
      parent_N: int32 parents, -1 at roots. Padding nodes are roots that are not leaves.
      leaf_N: bool, which nodes count as leaves; what is to be ignored is simply False.
      reward_N: float32 rewards; read on leaves only.
      weight_N: float32 weight of each node among its siblings (its multiplicity, or 1).

    Returns:
      float32 values `[N]`, zero where no leaf can be reached, and float32 leaf weights `[N]`, which
      are zero exactly there.
    """
    count = parent_N.shape[0]
    # Scatter roots past the end, where they are dropped: index -1 would wrap to the last node.
    up_N = jnp.where(parent_N < 0, count, parent_N)

    def push(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        n = count - 1 - i
        return tuple(s.at[up_N[n]].add(weight_N[n] * s[n], mode="drop") for s in sums)  # type: ignore[return-value]

    start = (jnp.where(leaf_N, reward_N, 0.0), jnp.where(leaf_N, 1.0, 0.0))
    total_N, weight_N = jax.lax.fori_loop(0, count, push, start)
    return total_N / jnp.where(weight_N > 0, weight_N, 1.0), weight_N


def gae(
    reward_T: Array, value_T: Array, mask_T: Array, *, gamma: float = 1.0, lam: float = 0.95
) -> Array:
    """Generalised advantage estimates of one action's tokens, float32 `[T]`.

      delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}

    Schulman et al. 2016, eq. 16. The action ends at the last token of `mask_T`: there V is 0
    beyond. Masked positions hold 0. Padding must follow the tokens.
    """
    reward_T = jnp.where(mask_T, reward_T, 0.0)
    value_T = jnp.where(mask_T, value_T, 0.0)
    next_T = jnp.append(value_T[1:], 0.0)
    delta_T = reward_T + gamma * next_T - value_T

    def back(advantage: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, live = at
        advantage = jnp.where(live, delta + gamma * lam * advantage, 0.0)
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros((), value_T.dtype), (delta_T, mask_T), reverse=True)[1]
