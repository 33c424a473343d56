"""Chunked log-probabilities: the logits of all tokens, `[tokens, vocab]`, never exist at once.

The gradient of a loss that is a sum over tokens is computed while the logits of a chunk exist, and
only gradients are stored for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jax_ragrl.learner.packing import Rows
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.matmul import einsum_f32
from jax_ragrl.runtime.sharding import batch_axes, target_platform
from jax_ragrl.sampling.decode import mask_logits, mask_padding, padding_of
from jax_ragrl.sampling.grammar import allowed_tokens
from jax_ragrl.text.automaton import TokenAutomaton

SCORED_TOKENS = 2048  # tokens per chunk and device
# Tokens per chunk and row. Rows differ in their number of scored tokens, and the loop over chunks
# ends with the longest: small chunks waste less.
SCORED_CHUNK = 128


# The tokens that the grammars of roles allow: bool `[Z, V]`, or the automaton of strict grammars.
Allowed = Array | TokenAutomaton


class Scores(NamedTuple):
    """Scores of tokens, `[R, M]`, as in `TokenOutputs`, and 0 after the last scored one."""

    logp_RM: Array
    entropy_RM: Array
    likeliest_RM: Array


class _Tokens(NamedTuple):
    """Scored tokens `[R, M]`: the hidden states that predict them, their ids and mask.

    `state_RM` and `budget_RM` are the arguments of their grammars, see `packing.Rows`.
    """

    hidden_RMD: Array
    target_RM: Array
    state_RM: Array
    mask_RM: Array
    budget_RM: Array | None


class _Head(NamedTuple):
    """Inputs of the distribution over the vocabulary.

    `copy_VD` is the output embedding in the compute dtype, and the float32 `sink_VD` receives its
    gradient, see `models/vocabulary.py`. `num_tokens` is the first id of padding, int32, or None.
    """

    copy_VD: Array
    sink_VD: Array
    temperature: Array
    allowed_ZV: Allowed | None
    num_tokens: Array | None


def score_tokens(
    policy: Decoder,
    hidden_RMD: Array,
    rows: Rows,
    temperature: Array,
    allowed_ZV: Allowed | None,
) -> Scores:
    """Scores the tokens of a batch, padding included, from the hidden states that predict them.

    The scores have no gradient. `temperature` is a float32 scalar that divides the logits;
    `allowed_ZV` are the tokens that the grammar of each role allows, None: all.
    """
    args = _head_and_tokens(policy, hidden_RMD, rows, temperature, allowed_ZV)
    scores: Scores = _per_device(lambda _, *x: _in_chunks(*x), *jax.lax.stop_gradient(args))
    return scores


# Maps log-probabilities, entropies, a mask and a tree of other inputs to a loss per token; all
# arrays have the same shape.
TokenLoss = Callable[[Array, Array, Array, Any], Array]


def token_loss(
    policy: Decoder,
    hidden_RMD: Array,
    rows: Rows,
    temperature: Array,
    allowed_ZV: Allowed | None,
    loss: TokenLoss,
    inputs_RM: Any,
) -> tuple[Array, Scores]:
    """Sums a loss over the scored tokens of a batch.

    On a mesh each device processes its own rows: the head is gathered once, and its gradient is
    summed over devices once, not per chunk. Of that sum, a device keeps only the columns that it
    trains, since the full sum in float32 would be several times as large as the head.

    Args:
      loss: the loss per token; padding has log-probability and entropy 0.
      inputs_RM: its other inputs, a tree of arrays `[R, M]`; not differentiable.

    Returns:
      The sum, which is differentiable, and the scores of `score_tokens`, which are not.
    """
    head, tokens = _head_and_tokens(policy, hidden_RMD, rows, temperature, allowed_ZV)
    loss_function = functools.partial(_loss_in_chunks, loss)
    loss_W, scores = _per_device(loss_function, head, tokens, inputs_RM)
    return jnp.sum(loss_W), scores


def _head_and_tokens(
    policy: Decoder, hidden_RMD: Array, rows: Rows, temperature: Array, allowed_ZV: Allowed | None
) -> tuple[_Head, _Tokens]:
    state_RM = jnp.zeros_like(rows.target_RM) if rows.state_RM is None else rows.state_RM
    num_tokens = padding_of(policy.config)
    head = _Head(*policy.head(hidden_RMD.dtype), temperature, allowed_ZV, num_tokens)
    return head, _Tokens(hidden_RMD, rows.target_RM, state_RM, rows.mask_RM, rows.budget_RM)


def _per_device(function: Any, head: _Head, *by_token: Any) -> Any:
    if not (axes := batch_axes()):
        return function(None, head, *by_token)
    split = "fsdp" if "fsdp" in axes else None
    by_row, everywhere = PartitionSpec(axes), PartitionSpec()
    sink = PartitionSpec(None, split)
    by_head = _Head(everywhere, sink, everywhere, everywhere, everywhere)  # type: ignore[arg-type]
    function_on_mesh = jax.shard_map(
        functools.partial(function, split),
        in_specs=(by_head, *(by_row for _ in by_token)),
        out_specs=by_row,
        axis_names=set(axes),
        check_vma=False,
    )
    return function_on_mesh(head, *by_token)


def _in_chunks(head: _Head, tokens: _Tokens) -> Scores:
    size, num_chunks = _chunks(tokens.mask_RM)

    def score(c: Array, scores: Scores) -> Scores:
        chunk = jax.tree.map(lambda x: _slice(x, c, size), tokens)
        new, _ = _score_chunk(_logits(head, chunk), chunk)
        return jax.tree.map(lambda x, y: _write(x, y, c), scores, new)

    scores: Scores = jax.lax.fori_loop(0, num_chunks, score, _zero_scores(tokens))
    return scores


def _zero_scores(tokens: _Tokens) -> Scores:
    zero_RM = jnp.zeros(tokens.mask_RM.shape, jnp.float32)
    return Scores(zero_RM, zero_RM, zero_RM > 0)


def _score_chunk(logits_RCV: Array, chunk: _Tokens) -> tuple[Scores, Array]:
    top_RC = jnp.max(logits_RCV, axis=-1)
    # Relative to the largest logit, exponentials cannot overflow.
    below_RCV = logits_RCV - top_RC[..., None]
    weight_RCV = jnp.exp(below_RCV)
    total_RC = jnp.sum(weight_RCV, axis=-1)
    # A token that a grammar forbids has weight 0 and logit -inf: their product would be NaN.
    mean_RC = jnp.sum(jnp.where(weight_RCV > 0, weight_RCV * below_RCV, 0.0), axis=-1)
    chosen_RC = jnp.sum(jnp.where(_one_hot(chunk, below_RCV), below_RCV, 0.0), axis=-1)
    log_RC = jnp.log(total_RC)
    scores = Scores(chosen_RC - log_RC, log_RC - mean_RC / total_RC, chosen_RC >= 0)
    return scores, top_RC + log_RC


class _Grads(NamedTuple):
    hidden_RMD: Array
    head_VD: Array


def _sum_columns(split: str, partial_VD: Array) -> Array:
    """Returns the columns of this device, summed over the devices of a mesh axis."""
    if target_platform() == "tpu":
        # XLA for TPU would sum all columns on every device. Sent to their owners, they are summed
        # there. Other platforms do that in one operation, which needs no second buffer.
        devices, (vocab, width) = jax.lax.axis_size(split), partial_VD.shape
        parts_VND = partial_VD.reshape(vocab, devices, width // devices)
        return jnp.sum(jax.lax.all_to_all(parts_VND, split, 1, 0), axis=0)
    # Scattered along the first axis of the transpose, whose rows are contiguous in memory.
    return jax.lax.psum_scatter(partial_VD.T, split, tiled=True).T


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_in_chunks(
    loss: TokenLoss, split: str | None, head: _Head, tokens: _Tokens, inputs_RM: Any
) -> tuple[Array, Scores]:
    """Returns the sum of a loss, float32 `[1]` per device, and the scores."""
    scores = _in_chunks(head, tokens)
    return _sum(loss, tokens.mask_RM, inputs_RM, *scores[:2])[None], scores


def _sum(loss: TokenLoss, mask: Array, inputs: Any, logp: Array, entropy: Array) -> Array:
    # Masked before the loss: NaN in padding would reach the gradient.
    logp, entropy = (jnp.where(mask, x, 0.0) for x in (logp, entropy))
    return jnp.sum(loss(logp, entropy, mask, inputs))


def _loss_forward(
    loss: TokenLoss, split: str | None, head: _Head, tokens: _Tokens, inputs_RM: Any
) -> tuple[tuple[Array, Scores], _Grads]:
    size, num_chunks = _chunks(tokens.mask_RM)

    def push(c: Array, carry: tuple[Scores, _Grads]) -> tuple[Scores, _Grads]:
        scores, grads = carry
        chunk, inputs_RC = jax.tree.map(lambda x: _slice(x, c, size), (tokens, inputs_RM))
        # 1. Logits and scores of the chunk.
        logits_RCV = _logits(head, chunk)
        new, lse_RC = _score_chunk(logits_RCV, chunk)
        # 2. Gradient of the loss with respect to the scores, then to the logits:
        #   d logp = onehot - p,   d entropy = -p (log p + entropy)
        sum_of_chunk = functools.partial(_sum, loss, chunk.mask_RM, inputs_RC)
        bars = jax.grad(sum_of_chunk, (0, 1))(*new[:2])
        lse, entropy, logp_bar, entropy_bar = (x[..., None] for x in (lse_RC, new[1], *bars))
        logp_RCV = logits_RCV - lse
        p_RCV = jnp.exp(logp_RCV)
        spread_RCV = jnp.where(p_RCV > 0, p_RCV * (logp_RCV + entropy), 0.0)
        onehot_RCV = _one_hot(chunk, logp_RCV).astype(jnp.float32)
        grad_RCV = logp_bar * (onehot_RCV - p_RCV) - entropy_bar * spread_RCV
        # 3. Gradients of hidden states and head; the logits are no longer needed. They are products
        # divided by temperature; products run in the compute dtype.
        grad_RCV = (grad_RCV / head.temperature).astype(head.copy_VD.dtype)
        back_RCD = einsum_f32("rcv,vd->rcd", grad_RCV, head.copy_VD)
        hidden_RMD = _write(grads.hidden_RMD, back_RCD.astype(grads.hidden_RMD.dtype), c)
        head_VD = grads.head_VD + einsum_f32("rcv,rcd->vd", grad_RCV, chunk.hidden_RMD)
        scores = jax.tree.map(lambda x, y: _write(x, y, c), scores, new)
        return scores, _Grads(hidden_RMD, head_VD)

    zero_VD = jnp.zeros(head.copy_VD.shape, jnp.float32)
    start = _zero_scores(tokens), _Grads(jnp.zeros_like(tokens.hidden_RMD), zero_VD)
    scores, grads = jax.lax.fori_loop(0, num_chunks, push, start)
    return (_sum(loss, tokens.mask_RM, inputs_RM, *scores[:2])[None], scores), grads


def _loss_backward(
    loss: TokenLoss, split: str | None, grads: _Grads, cotangent: tuple[Array, Scores]
) -> tuple[_Head, _Tokens, None]:
    # The gradients exist already; the cotangent of the sum scales them.
    scale = cotangent[0][0]
    grads = _Grads(*((scale * x.astype(jnp.float32)).astype(x.dtype) for x in grads))
    # Of the head only the columns of this device.
    head_VD = grads.head_VD if split is None else _sum_columns(split, grads.head_VD)
    head = _Head(None, head_VD, None, None, None)  # type: ignore[arg-type]
    return head, _Tokens(grads.hidden_RMD, None, None, None, None), None  # type: ignore[arg-type]


_loss_in_chunks.defvjp(_loss_forward, _loss_backward)


def _chunks(mask_RM: Array) -> tuple[int, Array]:
    """Returns tokens per row and chunk, and the number of chunks up to the last scored token."""
    count, length = mask_RM.shape
    most = max(1, min(SCORED_CHUNK, SCORED_TOKENS // count))
    # Chunks divide the row length, so that all have one static size.
    size = next(c for c in range(min(length, most), 0, -1) if length % c == 0)
    num_chunks = jnp.where(jnp.any(mask_RM, axis=0), jnp.arange(length) // size + 1, 0)
    return size, jnp.max(num_chunks)


def _slice(x_RM: Array, chunk: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x_RM, chunk * size, size, axis=1)


def _write(x_RM: Array, part_RC: Array, chunk: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x_RM, part_RC, chunk * part_RC.shape[1], axis=1)


def _logits(head: _Head, chunk: _Tokens) -> Array:
    """Returns float32 logits divided by temperature; minus infinity for forbidden tokens."""
    logits_RCV = einsum_f32("rcd,vd->rcv", chunk.hidden_RMD, head.copy_VD) / head.temperature
    logits_RCV = mask_padding(logits_RCV, head.num_tokens)
    if head.allowed_ZV is None:
        return logits_RCV
    if isinstance(head.allowed_ZV, TokenAutomaton):
        assert chunk.budget_RM is not None, "packed with strict grammars"
        allowed_RCV = allowed_tokens(head.allowed_ZV, chunk.state_RM, chunk.budget_RM)
        return mask_logits(logits_RCV, allowed_RCV)
    return mask_logits(logits_RCV, head.allowed_ZV[chunk.state_RM])


def _one_hot(chunk: _Tokens, like_RCV: Array) -> Array:
    place_RCV = jax.lax.broadcasted_iota(chunk.target_RM.dtype, like_RCV.shape, 2)
    return place_RCV == chunk.target_RM[..., None]
