"""Supervised fine-tuning: rows of (prompt, target), with a loss on what was written.

`imitate` is the policy gradient of demonstrations, each with advantage 1: the trainer, rows and
step of reinforcement learning. `sft_step` is a step of a loop of one's own, on rows packed in
order, where prompts may weigh something too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from jax_ragrl.learner.gradients import check_finite, read
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.packing import Rows, Turn, grouped, lay_out
from jax_ragrl.learner.state import Models, Trainer
from jax_ragrl.learner.targets import Targets
from jax_ragrl.learner.update import optimize
from jax_ragrl.rollout.context import written_ids
from jax_ragrl.runtime.sharding import fetch, on, ways
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message, Tensor


class Example(NamedTuple):
    """One supervised row: ids of the prompt and of what is to be written, and whose it is."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]
    role: str


def example(
    tokenizer: ChatTokenizer, messages: Sequence[Message], target: str, role: str
) -> Example:
    """A conversation and what `role` is to write next, which ends with the stop token."""
    return Example(tuple(tokenizer.chat(messages)), written_ids(tokenizer, target, True), role)


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


def rows_of(batch: Packed) -> Rows:
    """The rows that score every token of a packed batch from what stands before it, if it weighs
    anything. Jittable; M is L, and the last scored token of a row is padding."""
    at_1L = jnp.arange(batch.ids_RL.shape[1], dtype=jnp.int32)[None]
    same_RLL = batch.segments_RL[:, :, None] == batch.segments_RL[:, None, :]
    last_RL = jnp.max(jnp.where(same_RLL, at_1L[:, None, :], 0), axis=2)
    return Rows(
        ids_RL=batch.ids_RL,
        positions_RL=batch.positions_RL,
        until_RL=jnp.where(batch.segments_RL > 0, last_RL, at_1L) + 1,
        source_RM=jnp.broadcast_to(at_1L, batch.ids_RL.shape),
        target_RM=jnp.roll(batch.ids_RL, -1, axis=1),
        mask_RM=jnp.roll(batch.weight_RL > 0, -1, axis=1).at[:, -1].set(False),
    )


def token_losses(graph: Any, params: Any, batch: Packed) -> tuple[Array, Array]:
    """Cross-entropy of every next token, float32 `[R, L-1]`, and whether it was the likeliest; 0
    and False where the token weighs nothing."""
    reading = read(nnx.merge(graph, params), rows_of(batch), jnp.ones(()))
    assert reading.logp_RM is not None and reading.likeliest_RM is not None
    return -reading.logp_RM[:, :-1], reading.likeliest_RM[:, :-1]


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
    metrics = {"loss": loss, "token_accuracy": accuracy, "grad_norm": optax.tree.norm(grads)}
    return optax.apply_updates(params, updates), state, metrics


# No ratio, no reference, no critic; every token's advantage is 1.
IMITATION = Objective("none", critic="none", advantage="group_centred", kl=KL("none"))


def imitate(
    trainer: Trainer, models: Models, examples: Sequence[Example]
) -> tuple[Models, dict[str, float]]:
    """One optimizer step on the mean cross-entropy of the targets' tokens, at temperature 1.

    Metrics: `loss` and `grad_norm`, `entropy` and `tokens`, `skipped`. An example longer than the
    longest row is left out. Raises `UserError` if parameters are no longer finite.
    """
    turns = [Turn(i, e.role, e.prompt, e.target) for i, e in enumerate(examples)]
    groups = grouped(turns, trainer.layout)
    if not groups:
        return models, {}
    trainer = trainer._replace(objective=IMITATION, critic=None, temperature=1.0)
    part = lay_out(groups, trainer.roles, trainer.layout, ways(trainer.mesh))
    count = np.float32(sum(int(batch.rows.mask_RM.sum()) for batch in part))
    ones = [batch.rows.mask_RM.astype(np.float32) for batch in part]
    targets = [Targets(advantage=x, weight=x / count) for x in ones]
    with on(trainer.mesh):
        models, sums, _ = optimize(trainer, models, part, targets)
    metrics = {name: float(x) for name, x in fetch(sums).items()}
    check_finite(metrics)
    metrics["loss"] = metrics.pop("loss/policy")
    metrics["entropy"] /= metrics["tokens"]
    del metrics["clipped"]
    return models, metrics
