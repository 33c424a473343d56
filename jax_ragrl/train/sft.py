"""Supervised fine-tuning: rows of (prompt, target), packed, with a loss on what was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from jax_ragrl.models.decoder import causal_mask
from jax_ragrl.types import Tensor


class Example(NamedTuple):
    """One supervised row: ids of the prompt and of what is to be written, and whose it is."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]
    role: str


class Packed(NamedTuple):
    """Packed rows `[R, L]`: int32 ids, segments (0: padding) and positions, float32 loss weights.

    `weight_RL[r, i]` weighs the prediction of token `i` from what stands before it.
    """

    ids_RL: Tensor
    segments_RL: Tensor
    positions_RL: Tensor
    weight_RL: Tensor


def pack(
    examples: Sequence[Example], rows: int, length: int, *, prompt_weight: float = 0.0
) -> tuple[Packed, list[Example]]:
    """First-fit packing into `[rows, length]`; returns what did not fit for the next batch.

    Prompt tokens weigh `prompt_weight`, targets 1. An example longer than a row is dropped.
    """
    batch = Packed(
        np.zeros((rows, length), np.int32),
        np.zeros((rows, length), np.int32),
        np.zeros((rows, length), np.int32),
        np.zeros((rows, length), np.float32),
    )
    used, count, left = [0] * rows, [0] * rows, []
    for example in examples:
        size = len(example.prompt) + len(example.target)
        row = next((r for r in range(rows) if used[r] + size <= length), None)
        if row is None:
            left += [example] if size <= length else []
            continue
        count[row] += 1
        span = slice(used[row], used[row] + size)
        batch.ids_RL[row, span] = example.prompt + example.target
        batch.segments_RL[row, span] = count[row]
        batch.positions_RL[row, span] = np.arange(size)
        batch.weight_RL[row, span] = prompt_weight
        batch.weight_RL[row, span.start + len(example.prompt) : span.stop] = 1.0
        batch.weight_RL[row, span.start] = 0.0
        used[row] += size
    return batch, left


def token_losses(graph: Any, params: Any, batch: Packed) -> tuple[Array, Array]:
    """Cross-entropy of every next token, float32 `[R, L-1]`, and whether it was the likeliest."""
    model = nnx.merge(graph, params)
    hidden_RLD, _ = model(batch.ids_RL, batch.positions_RL, causal_mask(batch.segments_RL))
    logits_RLV = model.logits(hidden_RLD[:, :-1])
    target_RL = batch.ids_RL[:, 1:]
    loss_RL = optax.softmax_cross_entropy_with_integer_labels(logits_RLV, target_RL)
    return loss_RL, jnp.argmax(logits_RLV, axis=-1) == target_RL


def sft_step(
    graph: Any, optimizer: optax.GradientTransformation, params: Any, state: Any, batch: Packed
) -> tuple[Any, Any, dict[str, Array]]:
    """One update; jit it with `graph` and `optimizer` static. Returns params, state, metrics."""

    def mean_loss(params: Any) -> tuple[Array, Array]:
        loss_RL, right_RL = token_losses(graph, params, batch)
        weight_RL = batch.weight_RL[:, 1:]
        written_RL = weight_RL == 1.0
        accuracy = jnp.sum(right_RL & written_RL) / jnp.maximum(jnp.sum(written_RL), 1)
        return jnp.sum(loss_RL * weight_RL) / jnp.maximum(jnp.sum(weight_RL), 1.0), accuracy

    (loss, accuracy), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params)
    metrics = {"loss": loss, "token_accuracy": accuracy, "grad_norm": optax.global_norm(grads)}
    return optax.apply_updates(params, updates), state, metrics
