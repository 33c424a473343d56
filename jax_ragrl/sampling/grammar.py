"""Strict grammars on the devices: which tokens an automaton allows, and how much the mask removes.

Sampling and scoring call the same functions with the same states and budgets, so the ratio of their
probabilities is 1 before the first update.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.text.automaton import TokenAutomaton


def allowed_tokens(automaton: TokenAutomaton, state: Array, budget: Array) -> Array:
    """Returns the tokens that may come next: those that leave enough tokens to finish the action.

    At least one token is allowed in every state that the automaton reached within its budget.

    Args:
      state: int32, the state before the token, of any shape.
      budget: int32, the tokens that the action may still have, this one included, at least 1.

    Returns:
      bool, `[..., V]`; V is the size of the tokenizer.
    """
    budget = jnp.clip(budget, 1, jnp.iinfo(jnp.int16).max - 1).astype(jnp.int16)
    allowed_C = automaton.cost_SC[state] <= budget[..., None]
    return jnp.take(allowed_C, automaton.class_V.astype(jnp.int32), axis=-1)


def next_states(automaton: TokenAutomaton, state_B: Array, ids_B: Array) -> Array:
    """Returns the states after one token per row, int32."""
    # An id beyond the tokenizer's is never allowed; rows that are done may hold one.
    class_B = automaton.class_V[jnp.minimum(ids_B, automaton.class_V.shape[0] - 1)]
    return automaton.next_SC[state_B, class_B.astype(jnp.int32)].astype(jnp.int32)


def removed_mass(logits_BV: Array, masked_BV: Array) -> Array:
    """Returns the probability of the tokens that a mask forbids, float32 per row.

      1 - sum of p(v) over the allowed tokens v,   p = softmax(logits)

    Both are float32 logits, divided by the temperature, without and with the mask.
    """
    all_B, allowed_B = (jax.nn.logsumexp(x_BV, axis=-1) for x_BV in (logits_BV, masked_BV))
    # Rounding may put the difference a little above 0.
    return -jnp.expm1(jnp.minimum(allowed_B - all_B, 0.0))
