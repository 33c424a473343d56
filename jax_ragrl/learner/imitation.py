"""Supervised fine-tuning on examples of a prompt and a target.

`imitate` treats demonstrations as policy gradients with advantage 1, on the policy, the packing and
the step of reinforcement learning (`ragrl warmup sft`). `sft_step` is a plain train step on rows
packed in order, in which prompts may have a weight too (`ragrl warmup tiny`).
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

from jax_ragrl.errors import UserError
from jax_ragrl.learner.gradients import TrainState, apply, token_outputs
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Rows, Turn, group_turns, lay_out
from jax_ragrl.learner.state import Policy
from jax_ragrl.learner.update import likelihood_step
from jax_ragrl.rollout.context import action_ids
from jax_ragrl.runtime.sharding import data_parallel_size
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message, Tensor


class Example(NamedTuple):
    """One supervised example: ids of the prompt, ids of the target, and the role that writes it."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]
    role: str


def example(
    tokenizer: ChatTokenizer, messages: Sequence[Message], target: str, role: str
) -> Example:
    """Encodes a conversation and the reply to learn, to which a stop token is appended."""
    return Example(tuple(tokenizer.chat(messages)), action_ids(tokenizer, target, True), role)


class PackedRows(NamedTuple):
    """Packed rows `[R, L]`: int32 ids, segments (0: padding) and positions, float32 loss weights.

    `weight_RL[r, i]` weighs the prediction of token `i` from the tokens before it.
    """

    ids_RL: Tensor
    segments_RL: Tensor
    positions_RL: Tensor
    weight_RL: Tensor


def pack(
    examples: Sequence[Example], rows: int, length: int, *, prompt_weight: float = 0.0
) -> tuple[PackedRows, list[Example]]:
    """Packs examples into `[rows, length]`, first fit; longer ones are dropped.

    `prompt_weight` is the loss weight of prompt tokens; target tokens have weight 1. Also returns
    the examples that did not fit, for the next batch.
    """
    batch = PackedRows(*(np.zeros((rows, length), t) for t in (*[np.int32] * 3, np.float32)))
    lengths, count, rest = [0] * rows, [0] * rows, []
    for example in examples:
        size = len(example.prompt) + len(example.target)
        row = next((r for r in range(rows) if lengths[r] + size <= length), None)
        if row is None:
            rest += [example] if size <= length else []
            continue
        count[row] += 1
        span = slice(lengths[row], lengths[row] + size)
        batch.ids_RL[row, span] = example.prompt + example.target
        batch.segments_RL[row, span] = count[row]
        batch.positions_RL[row, span] = np.arange(size)
        batch.weight_RL[row, span] = prompt_weight
        batch.weight_RL[row, span.start + len(example.prompt) : span.stop] = 1.0
        batch.weight_RL[row, span.start] = 0.0  # nothing before it predicts the first token
        lengths[row] += size
    return batch, rest


def rows_of(batch: PackedRows) -> Rows:
    """Returns the rows that score every packed token with a weight. Jittable.

    M equals L, and the last scored token of a row is padding: the first token is never scored.
    """
    at_1L = jnp.arange(batch.ids_RL.shape[1], dtype=jnp.int32)[None]
    # The last token of the segment of each token; padding has segment 0 and sees only itself.
    same_RLL = batch.segments_RL[:, :, None] == batch.segments_RL[:, None, :]
    last_RL = jnp.max(jnp.where(same_RLL, at_1L[:, None, :], 0), axis=2)
    return Rows(
        ids_RL=batch.ids_RL,
        positions_RL=batch.positions_RL,
        # A token is visible to the end of its segment; padding to itself alone.
        until_RL=jnp.where(batch.segments_RL > 0, last_RL, at_1L) + 1,
        source_RM=jnp.broadcast_to(at_1L, batch.ids_RL.shape),
        target_RM=jnp.roll(batch.ids_RL, -1, axis=1),
        mask_RM=jnp.roll(batch.weight_RL > 0, -1, axis=1).at[:, -1].set(False),
    )


def token_losses(
    graph: Any, params: Any, batch: PackedRows, weight_RL: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """Computes the cross-entropy of every next token under a split decoder.

    Returns:
      Losses in nats, float32 `[R, L-1]`, without a gradient; whether the token was the likeliest,
      bool; and the sum by `weight_RL`, if given, which is differentiable. Tokens without a weight
      have 0 and False.
    """

    def weighted(logp: Array, entropy: Array, mask: Array, weight: Array) -> Array:
        return -logp * weight

    # As in `rows_of`, the scored token of a place is the next one.
    weight_RM = None if weight_RL is None else jnp.roll(weight_RL, -1, axis=1)
    loss = (None, None) if weight_RM is None else (weighted, lambda _: weight_RM)
    model, rows = nnx.merge(graph, params), rows_of(batch)
    outputs = token_outputs(model, rows, jnp.ones(()), None, *loss)
    assert outputs.logp_RM is not None and outputs.likeliest_RM is not None
    return -outputs.logp_RM[:, :-1], outputs.likeliest_RM[:, :-1], outputs.loss


def sft_step(
    graph: Any, optimizer: optax.GradientTransformation, state: TrainState, batch: PackedRows
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one optimizer step on the weighted mean loss; jit it with the first two static.

    The metrics are `loss`, `token_accuracy` (over targets) and those of `gradients.apply`.
    """
    weight_RL = batch.weight_RL[:, 1:]
    share_RL = batch.weight_RL * (1.0 / jnp.maximum(jnp.sum(weight_RL), 1.0))

    def mean_loss(params: Any) -> tuple[Array, tuple[Array, Array]]:
        loss_RL, right_RL, total = token_losses(graph, params, batch, share_RL)
        assert total is not None
        return total, (loss_RL, right_RL)

    grads, (loss_RL, right_RL) = jax.grad(mean_loss, has_aux=True)(state.params)
    loss = jnp.sum(loss_RL * weight_RL) / jnp.maximum(jnp.sum(weight_RL), 1.0)
    # Accuracy counts targets only, not prompt tokens with a small weight.
    target_RL = weight_RL == 1.0
    accuracy = jnp.sum(right_RL & target_RL) / jnp.maximum(jnp.sum(target_RL), 1)
    state, metrics = apply(optimizer, state, grads)
    return state, {"loss": loss, "token_accuracy": accuracy, **metrics}


def check_one_step_per_batch(optimizer: Optimizer) -> None:
    for name in ("epochs", "minibatches"):
        if getattr(optimizer, name) != 1:
            raise UserError(
                f"optimizer.{name} is {getattr(optimizer, name)}, but supervised training takes "
                "one step per batch: leave it out, and set 'epochs' or 'steps' of the config"
            )


def imitate(policy: Policy, examples: Sequence[Example]) -> tuple[Policy, dict[str, float]]:
    """Takes one optimizer step on the mean cross-entropy of the target tokens, at temperature 1.

    The buffers of the trained state are donated. An example longer than a row is left out. The
    metrics are `loss`, `grad_norm`, `entropy`, `tokens` and `skipped`. Raises `UserError` if
    parameters are no longer finite.
    """
    turns = [Turn(i, e.role, e.prompt, e.target) for i, e in enumerate(examples)]
    spec = policy.spec
    groups = group_turns(turns, spec.layout)
    if not groups:
        return policy, {}
    batches = lay_out(groups, spec.roles, spec.layout, data_parallel_size(spec.mesh))
    count = np.float32(sum(int(batch.rows.mask_RM.sum()) for batch in batches))
    # The loss, minus the weighted sum of the log-probabilities, is the mean cross-entropy.
    weights = [batch.rows.mask_RM / count for batch in batches]
    cold = policy._replace(spec=spec._replace(temperature=1.0))
    policy, metrics = likelihood_step(cold, batches, weights)
    # The names of supervised training: a ratio is never clipped here.
    metrics["loss"] = metrics.pop("loss/policy")
    metrics["entropy"] /= metrics["tokens"]
    del metrics["clipped"]
    return policy._replace(spec=spec), metrics
