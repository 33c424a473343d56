"""Returns: Monte Carlo means over leaves or over children, and GAE along contexts.

Pure functions of arrays; `credit.assign` applies them to whole forests.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array


def monte_carlo(
    parent_N: Array, leaf_N: Array, reward_N: Array, weight_N: Array
) -> tuple[Array, Array]:
    """Computes the mean return of the paths from each node to the leaves below it.

      value(n) = sum_l w(n -> l) G(n -> l) / sum_l w(n -> l)

    `G` is the sum of the rewards of the path from `n` to leaf `l`, both included, and `w` the
    product of `weight_N` below `n` on that path (all ones: the plain mean). Chen et al. 2025
    (C-3PO), eq. 5, in which only leaves have rewards, so that `G` is the reward of the leaf. Every
    child comes after its parent, so one reverse pass suffices.

    Args:
      parent_N: int32 parents, -1 at roots. Padding nodes are roots that are not leaves.
      leaf_N: bool, the nodes that count as leaves; False at leaves to ignore.
      reward_N: float32 rewards of leaves and actions; not read at nodes without a leaf below.
      weight_N: float32 weight of each node among its siblings (its multiplicity, or 1).

    Returns:
      The values, float32 `[N]`, and the summed weights of the leaves, float32 `[N]`; both are zero
      at nodes without a leaf below.
    """
    count = parent_N.shape[0]
    # Scatter roots past the end, which drops them: index -1 would wrap to the last node.
    up_N = jnp.where(parent_N < 0, count, parent_N)

    # Each node adds its weighted sums to its parent; nodes after it are complete by then.
    def push(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        n = count - 1 - i
        total_N, leaves_N = sums
        # Mask before the product: the reward of a node without a leaf may be nan.
        own = jnp.where(leaves_N[n] > 0, reward_N[n], 0.0) * leaves_N[n]
        total_N = total_N.at[n].add(own)
        up, weight = up_N[n], weight_N[n]
        total_N = total_N.at[up].add(weight * total_N[n], mode="drop")
        return total_N, leaves_N.at[up].add(weight * leaves_N[n], mode="drop")

    leaves_N = jnp.where(leaf_N, 1.0, 0.0)
    total_N, leaves_N = jax.lax.fori_loop(0, count, push, (jnp.zeros_like(leaves_N), leaves_N))
    return total_N / jnp.where(leaves_N > 0, leaves_N, 1.0), leaves_N


def mean_of_children(
    parent_N: Array, leaf_N: Array, reward_N: Array, weight_N: Array
) -> tuple[Array, Array]:
    """Computes the value of each node as its reward plus the mean over its children's values.

      value(n) = r(n) + sum_c w(c) value(c) / sum_c w(c),   c over the children of n

    Children without a leaf below do not count. A mean over children is a mean over the actions that
    the policy sampled in a state. The mean over leaves (`monte_carlo`) instead weighs an action by
    the number of leaves below it, which is biased if that number depends on what happens there.

    Args:
      parent_N, leaf_N, reward_N, weight_N: as in `monte_carlo`.

    Returns:
      The values, float32 `[N]`, zero at nodes without a leaf below; and float32 `[N]`, 1 at nodes
      with a leaf below, else 0.
    """
    count = parent_N.shape[0]
    up_N = jnp.where(parent_N < 0, count, parent_N)  # roots: past the end, which drops them

    def push(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        n = count - 1 - i
        value_N, total_N, members_N = state
        has_value = leaf_N[n] | (members_N[n] > 0)
        mean = total_N[n] / jnp.where(members_N[n] > 0, members_N[n], 1.0)
        # Mask before the sum: the reward of a node without a leaf may be nan.
        value = jnp.where(has_value, reward_N[n], 0.0) + mean
        up, weight = up_N[n], jnp.where(has_value, weight_N[n], 0.0)
        total_N = total_N.at[up].add(weight * value, mode="drop")
        members_N = members_N.at[up].add(weight, mode="drop")
        return value_N.at[n].set(value), total_N, members_N

    zeros_N = jnp.zeros_like(reward_N)
    value_N, _, members_N = jax.lax.fori_loop(0, count, push, (zeros_N, zeros_N, zeros_N))
    return value_N, jnp.where(leaf_N | (members_N > 0), 1.0, 0.0)


def gae(
    reward_T: Array, value_T: Array, mask_T: Array, *, gamma: float = 1.0, lam: float = 0.95
) -> Array:
    """Computes generalised advantage estimates of the tokens of one context, float32 `[T]`.

      delta_t = r_t + gamma V_next - V_t,   A_t = delta_t + gamma lam A_next

    Schulman et al. 2016, eq. 16. "next" is the next token of `mask_T` (V and A are 0 after the
    last): the estimate skips tokens in between, such as an observation after a turn. Positions
    outside the mask have estimate 0 and are never read.

    Args:
      reward_T: float32, the reward of each token.
      value_T: float32, the critic's value of the state before each token.
      mask_T: bool, the tokens that the policy wrote.
      gamma: the discount per token.
      lam: the decay of the estimate (lambda); 1 gives Monte Carlo returns minus values.
    """
    reward_T = jnp.where(mask_T, reward_T, 0.0)
    value_T = jnp.where(mask_T, value_T, 0.0)

    def back(
        following: tuple[Array, Array], at: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        reward, value, mask = at
        next_value, next_advantage = following
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        # A masked position passes on the value and the estimate of the token after it.
        here = (jnp.where(mask, value, next_value), jnp.where(mask, advantage, next_advantage))
        return here, jnp.where(mask, advantage, 0.0)

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
    """Applies `gae` along whole conversations, float32 `[A, T]`, 0 outside `mask_AT`.

    The estimate of a turn that several conversations share is the mean of their estimates; a turn
    in no conversation has estimate 0.

    Args:
      reward_AT: float32, the reward of each token of each turn.
      value_AT: float32, the critic's value of the state before each token.
      mask_AT: bool, the tokens that the policy wrote.
      path_CS: int32; row `c` lists the turns of a conversation in order, as indices into the first
        axis of the other arguments, with -1 after its end.
      gamma, lam: as in `gae`.
    """
    count, width = mask_AT.shape
    present_CS = path_CS >= 0

    def along(x_AT: Array) -> Array:
        return x_AT[path_CS].reshape(len(path_CS), -1)

    mask_CL = along(mask_AT) & jnp.repeat(present_CS, width, axis=1)
    estimate = functools.partial(gae, gamma=gamma, lam=lam)
    estimate_CL = jax.vmap(estimate)(along(reward_AT), along(value_AT), mask_CL)
    into_CS = jnp.where(present_CS, path_CS, count)  # scatters past the end are dropped
    estimate_CST = estimate_CL.reshape(*path_CS.shape, width)
    zeros_AT = jnp.zeros_like(estimate_CL, shape=mask_AT.shape)
    sum_AT = zeros_AT.at[into_CS].add(estimate_CST, mode="drop")
    ones_CS = jnp.ones_like(estimate_CL, shape=path_CS.shape)
    count_A = jnp.zeros_like(estimate_CL, shape=count).at[into_CS].add(ones_CS, mode="drop")
    return sum_AT / jnp.maximum(count_A, 1)[:, None]
