"""Every objective learns: a bandit of two roles with a softmax table for a policy.

A question is a context. The first role picks a token, the second sees the question and that token
and picks another, and both get the payoff of the pair: the smallest of lines. The best pair of
every context is known, and so is the policy that is best under a KL penalty.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out, whiten
from jax_ragrl.credit.returns import gae, monte_carlo
from jax_ragrl.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    dpo_loss,
    dual_clipped_policy_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    policy_gradient_loss,
    sequence_mean_weights,
    token_mean_weights,
)

S, V, G = 3, 3, 16  # contexts, tokens, rollouts of a context
A = S * G
CONTEXT_A = np.repeat(np.arange(S, dtype=np.int32), G)
PAYOFF = np.random.default_rng(5).random((S, V, V)).astype(np.float32)
PAYOFF[np.arange(S), [0, 2, 1], [1, 0, 2]] = 1.25
# Logits of every state: the contexts, then the contexts with a first token.
REFERENCE = np.random.default_rng(1).normal(size=(S + S * V, V)).astype(np.float32) / 2

# A rollout as one context of both tokens, and as two nodes of one token. Padding is always there.
MASK_AT = np.tile([True, True, False], (A, 1))
MASK_NT = np.tile([True, False], (2 * A, 1))
PARENT_N = np.where(np.arange(2 * A) % 2, np.arange(2 * A) - 1, -1).astype(np.int32)
FIRST_N = PARENT_N < 0


class Params(NamedTuple):
    table: jax.Array
    value: jax.Array


class Rollouts(NamedTuple):
    """Pairs of tokens `[A, 2]`, their payoffs `[A]`, and the KL coefficient of the run."""

    tokens: jax.Array
    payoff: jax.Array
    beta: jax.Array


class Targets(NamedTuple):
    """Targets that are fixed for the epochs of one update."""

    logp: jax.Array
    advantage: jax.Array
    value: jax.Array
    target: jax.Array


def play(table, beta, key):
    """One pair for each row."""
    keys = jax.random.split(key)
    first_A = jax.random.categorical(keys[0], table[CONTEXT_A])
    second_A = jax.random.categorical(keys[1], table[S + CONTEXT_A * V + first_A])
    payoff_A = jnp.asarray(PAYOFF)[CONTEXT_A, first_A, second_A]
    return Rollouts(jnp.stack([first_A, second_A], axis=1), payoff_A, beta)


def states_of(tokens):
    return jnp.stack([jnp.asarray(CONTEXT_A), S + CONTEXT_A * V + tokens[:, 0]], axis=1)


def logp_of(table, tokens):
    return jax.nn.log_softmax(table)[states_of(tokens), tokens]


def by_context(x_A2):
    """Rows of both tokens and their padding, which holds nan."""
    return jnp.pad(x_A2, ((0, 0), (0, 1)), constant_values=jnp.nan)


def by_node(x_A2):
    """Rows of one token and their padding."""
    return jnp.pad(x_A2.reshape(-1, 1), ((0, 0), (0, 1)), constant_values=jnp.nan)


def shared(payoff_A):
    """The payoff of each rollout at both of its nodes."""
    reward_N = jnp.zeros(2 * A).at[1::2].set(payoff_A)
    return monte_carlo(jnp.asarray(PARENT_N), ~FIRST_N, reward_N, jnp.ones(2 * A))[0]


def by_group(rule, reward_A):
    """Applies a group rule to the rollouts of each context."""
    return jax.vmap(rule)(reward_A.reshape(S, G)).reshape(A)


class PPO:
    """One agent writes both tokens, and the estimates run over the two of them."""

    epochs = 4
    rows, mask = staticmethod(by_context), MASK_AT
    credit = staticmethod(lambda payoff: payoff)

    @classmethod
    def targets(cls, params, rollouts):
        logp = cls.rows(logp_of(params.table, rollouts.tokens))
        value = cls.rows(params.value[states_of(rollouts.tokens)])
        last = cls.mask.sum(axis=1)[0] - 1
        reward = jnp.zeros_like(value).at[:, last].set(cls.credit(rollouts.payoff))
        advantage = jax.vmap(gae)(reward, value, jnp.asarray(cls.mask))
        return Targets(logp, whiten(advantage, cls.mask), value, advantage + value)

    @classmethod
    def loss(cls, params, rollouts, t):
        logp = cls.rows(logp_of(params.table, rollouts.tokens))
        value = cls.rows(params.value[states_of(rollouts.tokens)])
        policy = clipped_policy_loss(logp, t.logp, t.advantage, cls.mask)
        critic = clipped_value_loss(value, t.value, t.target, cls.mask)
        return jnp.sum(token_mean_weights(cls.mask) * (policy + critic))


class MAPPO(PPO):
    """Two roles share one table and one reward, and their tokens are pooled (MMOA-RAG)."""

    rows, mask, credit = staticmethod(by_node), MASK_NT, staticmethod(shared)


class GRPO:
    """CoDA's: statistics of rollouts, dual clip, KL in the loss; a sequence mean."""

    epochs = 2
    kl = staticmethod(kl_k3)

    @staticmethod
    def targets(params, rollouts):
        advantage_N = jnp.repeat(by_group(group_normalised, rollouts.payoff), 2)
        logp = by_node(logp_of(params.table, rollouts.tokens))
        return logp, jnp.broadcast_to(advantage_N[:, None], MASK_NT.shape)

    @classmethod
    def loss(cls, params, rollouts, targets):
        logp = by_node(logp_of(params.table, rollouts.tokens))
        ref = by_node(logp_of(jnp.asarray(REFERENCE), rollouts.tokens))
        loss = dual_clipped_policy_loss(logp, *targets, MASK_NT)
        loss = loss + rollouts.beta * cls.kl(logp, ref, MASK_NT)
        return jnp.sum(sequence_mean_weights(MASK_NT) * loss)


class GRPOWithK2(GRPO):
    kl = staticmethod(kl_k2)


class MAPGRPO:
    """OPERA's: mean-centred, no ratio, one step on each batch; here with k1 in the reward."""

    epochs = 1
    compare = staticmethod(group_centred)

    @classmethod
    def targets(cls, params, rollouts):
        logp = by_context(logp_of(params.table, rollouts.tokens))
        ref = by_context(logp_of(jnp.asarray(REFERENCE), rollouts.tokens))
        reward_A = rollouts.payoff - rollouts.beta * kl_k1(logp, ref, MASK_AT).sum(axis=1)
        advantage_A = by_group(cls.compare, reward_A)
        return jnp.broadcast_to(advantage_A[:, None], MASK_AT.shape)

    @staticmethod
    def loss(params, rollouts, advantage):
        logp = by_context(logp_of(params.table, rollouts.tokens))
        loss = policy_gradient_loss(logp, advantage, MASK_AT)
        return jnp.sum(token_mean_weights(MASK_AT) * loss)


class RLOO(MAPGRPO):
    compare = staticmethod(leave_one_out)


class DPO:
    """Each rollout against the next of its context: the better one is chosen, ties are left out."""

    epochs = 1

    @staticmethod
    def targets(params, rollouts):
        next_A = np.arange(A).reshape(S, G)[:, np.roll(np.arange(G), -1)].ravel()
        ahead_A = rollouts.payoff - rollouts.payoff[next_A]
        own, other = rollouts.tokens, rollouts.tokens[next_A]
        better = (ahead_A > 0)[:, None]
        return jnp.where(better, own, other), jnp.where(better, other, own), ahead_A != 0

    @staticmethod
    def loss(params, rollouts, pairs):
        *answers, differ_A = pairs
        tables = (params.table, jnp.asarray(REFERENCE))
        logps = [logp_of(table, tokens).sum(axis=1) for table in tables for tokens in answers]
        return jnp.mean(jnp.where(differ_A, dpo_loss(*logps), 0.0))


@functools.partial(jax.jit, static_argnums=0)
def learn(method, sign, beta, key):
    """The table after 300 updates from the reference; a `sign` of -1 climbs the loss instead."""
    updates = 300
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, updates * method.epochs))
    start = Params(jnp.asarray(REFERENCE), jnp.zeros(S + S * V))

    def update(carry, key):
        rollouts = play(carry[0].table, beta, key)
        targets = method.targets(carry[0], rollouts)

        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: sign * method.loss(p, rollouts, targets))(params)
            with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
                moves, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, moves), state), None

        return jax.lax.scan(step, carry, length=method.epochs)[0], None

    carry = (start, optimizer.init(start))
    return jax.lax.scan(update, carry, jax.random.split(key, updates))[0][0].table


def joint(table) -> np.ndarray:
    """The probability of every pair, float64 `[S, V, V]`."""
    table = np.asarray(table, np.float64)
    each = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    return each[:S, :, None] * each[S:].reshape(S, V, V)


def worth(table) -> float:
    return float((joint(table) * PAYOFF).sum() / S)


def divergence(p, q) -> float:
    """KL(p | q) of pairs, averaged over contexts."""
    return float((p * np.log(p / q)).sum() / S)


BEST = float(PAYOFF.max(axis=(1, 2)).mean())
START = worth(REFERENCE)
REWARD_COEFFICIENTS = (0.05, 0.2, 0.8)
LOSS_COEFFICIENTS = (0.4, 0.8, 1.6)  # larger: a normalised advantage is of size one


@pytest.mark.parametrize("method", [PPO, MAPPO, GRPO, MAPGRPO, RLOO, DPO])
def test_every_objective_reaches_the_optimum(method):
    assert START < 0.5 * BEST
    actual = [
        worth(learn(method, *jax.device_put(np.float32([sign, 0.001])), jax.random.key(0)))
        for sign in (1, -1)
    ]
    assert actual[0] > 0.97 * BEST and actual[1] < 0.5 * START


def regularised(method, coefficients) -> list[np.ndarray]:
    """Returns the policy that `method` learns under each KL coefficient."""
    betas = jax.device_put(np.float32(coefficients))
    run = jax.vmap(functools.partial(learn, method), in_axes=(None, 0, None))
    return [joint(table) for table in run(jnp.float32(1), betas, jax.random.key(0))]


@pytest.mark.parametrize("method", [GRPO, GRPOWithK2])
def test_a_larger_loss_coefficient_ends_nearer_the_reference(method):
    actual = regularised(method, LOSS_COEFFICIENTS)
    far, middle, near = (divergence(p, joint(REFERENCE)) for p in actual)
    assert far > 1.5 * middle and middle > 1.5 * near > 0


def test_a_reward_coefficient_ends_at_the_regularized_optimum():
    """The best of E[R] - beta KL(p | q) is p = q exp(R / beta), normalised."""
    actual = regularised(MAPGRPO, REWARD_COEFFICIENTS)
    far, middle, near = (divergence(p, joint(REFERENCE)) for p in actual)
    assert far > 1.5 * middle and middle > 1.5 * near > 0
    for beta, p in zip(REWARD_COEFFICIENTS, actual, strict=True):
        best = joint(REFERENCE) * np.exp(PAYOFF / beta)
        best /= best.sum(axis=(1, 2), keepdims=True)
        assert divergence(p, best) < 0.05 < divergence(joint(REFERENCE), best)
