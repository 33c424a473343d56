"""Returns: the mean over the paths from a node to its leaves, and GAE along contexts.

Arrays in, arrays out; `credit.assign` applies them to whole forests.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array


def monte_carlo(
    parent_N: Array, leaf_N: Array, reward_N: Array, weight_N: Array
) -> tuple[Array, Array]:
    """The mean return of the paths from each node to the leaves that it can reach.

      value(n) = sum_l w(n -> l) G(n -> l) / sum_l w(n -> l)

    where `G` is the sum of the rewards of the path from `n` to leaf `l`, both included, and `w` the
    product of `weight_N` below `n` on that path (all ones: the plain mean). Chen et al. 2025
    (C-3PO), eq. 5, in which only leaves have rewards, so that `G` is the reward of the leaf. One
    reverse pass: every child comes after its parent.

    Args:
      parent_N: int32 parents, -1 at roots. Padding nodes are roots that are not leaves.
      leaf_N: bool, which nodes count as leaves; what is to be ignored is simply False.
      reward_N: float32 rewards of leaves and of actions; not read where no leaf can be reached.
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
        total_N, leaves_N = sums
        earned = jnp.where(leaves_N[n] > 0, reward_N[n], 0.0) * leaves_N[n]
        total_N = total_N.at[n].add(earned)
        up, weight = up_N[n], weight_N[n]
        total_N = total_N.at[up].add(weight * total_N[n], mode="drop")
        return total_N, leaves_N.at[up].add(weight * leaves_N[n], mode="drop")

    leaves_N = jnp.where(leaf_N, 1.0, 0.0)
    total_N, leaves_N = jax.lax.fori_loop(0, count, push, (jnp.zeros_like(leaves_N), leaves_N))
    return total_N / jnp.where(leaves_N > 0, leaves_N, 1.0), leaves_N


def gae(
    reward_T: Array, value_T: Array, mask_T: Array, *, gamma: float = 1.0, lam: float = 0.95
) -> Array:
    """Generalised advantage estimates of the tokens of one context, float32 `[T]`.

      delta_t = r_t + gamma V_next - V_t,   A_t = delta_t + gamma lam A_next

    Schulman et al. 2016, eq. 16, where "next" is the next token of `mask_T` (V and A are 0 beyond
    the last): the estimate passes over what stands between, such as an observation after a turn,
    as if it were not there. Masked positions hold 0 and are never read, their rewards included.
    """
    reward_T = jnp.where(mask_T, reward_T, 0.0)
    value_T = jnp.where(mask_T, value_T, 0.0)

    def back(
        after: tuple[Array, Array], at: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        reward, value, kept = at
        next_value, next_advantage = after
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        here = (jnp.where(kept, value, next_value), jnp.where(kept, advantage, next_advantage))
        return here, jnp.where(kept, advantage, 0.0)

    zero = jnp.zeros((), value_T.dtype)
    return jax.lax.scan(back, (zero, zero), (reward_T, value_T, mask_T), reverse=True)[1]


def gae_over_turns(
    reward_AT: Array,
    value_AT: Array,
    mask_AT: Array,
    path_CS: Array,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Array:
    """`gae` along whole conversations, float32 `[A, T]`, 0 where `mask_AT` is False.

    Row `c` of `path_CS` (int32) holds the turns of a conversation in order, as rows of the other
    arguments, and -1 past its end. The estimate of a turn that several conversations go through is
    their mean, and 0 where none does.
    """
    count, width = mask_AT.shape
    there_CS = path_CS >= 0

    def along(x_AT: Array) -> Array:
        return x_AT[path_CS].reshape(len(path_CS), -1)

    mask_CL = along(mask_AT) & jnp.repeat(there_CS, width, axis=1)
    estimate = functools.partial(gae, gamma=gamma, lam=lam)
    found_CL = jax.vmap(estimate)(along(reward_AT), along(value_AT), mask_CL)
    into_CS = jnp.where(there_CS, path_CS, count)  # past the end, where it is dropped
    found_CST = found_CL.reshape(*path_CS.shape, width)
    sum_AT = jnp.zeros_like(found_CL, shape=mask_AT.shape).at[into_CS].add(found_CST, mode="drop")
    ones_CS = jnp.ones_like(found_CL, shape=path_CS.shape)
    times_A = jnp.zeros_like(found_CL, shape=count).at[into_CS].add(ones_CS, mode="drop")
    return sum_AT / jnp.maximum(times_A, 1)[:, None]
