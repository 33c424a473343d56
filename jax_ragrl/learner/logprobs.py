"""How likely written tokens were, without the logits of all of them at once.

Logits are made for a chunk of tokens at a time. Where a loss is a sum over tokens, the gradient of
a chunk is made while its logits are there: three products with the vocabulary, and what is kept is
the gradient. Where it is not (DPO), they are made again in the backward pass: what is kept of a
token is its log-sum-exp and its entropy, from which its probabilities follow.
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
from jax_ragrl.models.matmul import product
from jax_ragrl.runtime.sharding import axis_size
from jax_ragrl.sampling.decode import only

SCORED_TOKENS = 2048  # logits held at once on a device, in tokens
SCORED_CHUNK = 128  # and of one row: rows score different numbers, and the loop ends with the last


class Scores(NamedTuple):
    """Of scored tokens `[R, M]`: log-probability and entropy, float32, and whether it was the
    likeliest, bool. After the last token that any row scores all are 0."""

    logp_RM: Array
    entropy_RM: Array
    likeliest_RM: Array


class _Tokens(NamedTuple):
    """Scored tokens `[R, M]`: the hidden states that predict them, and what they are."""

    hidden_RMD: Array
    target_RM: Array
    role_RM: Array
    mask_RM: Array


class _Head(NamedTuple):
    """What turns hidden states into probabilities; its gradient goes into the sink, see
    `models/vocabulary.py`. `allowed_ZV` are the tokens that a role may write; None: all."""

    copy_VD: Array
    sink_VD: Array
    temperature: Array
    allowed_ZV: Array | None


def score_tokens(
    policy: Decoder,
    hidden_RMD: Array,
    rows: Rows,
    temperature: Array,
    allowed_ZV: Array | None,
) -> Scores:
    """The scores of a batch at a temperature, padding included.

    On a mesh each device goes through its own rows, so that the head is gathered once, and its
    gradient summed over the devices once, not with every chunk. Of that sum a device keeps the part
    of the width that it trains: all of it in float32 would be several times the head itself.
    (XLA for a TPU may still sum all of it first, as seen with 192 columns a device.)
    """
    parts = _parts(policy, hidden_RMD, rows, temperature, allowed_ZV)
    scores: Scores = _on_each(_in_chunks, *parts)
    return scores


# The losses of tokens, from their log-probabilities, entropies and mask, and whatever else is given
# of each: arrays of one shape.
TokenLoss = Callable[[Array, Array, Array, Any], Array]


def token_loss(
    policy: Decoder,
    hidden_RMD: Array,
    rows: Rows,
    temperature: Array,
    allowed_ZV: Array | None,
    loss: TokenLoss,
    given_RM: Any,
) -> tuple[Array, Scores]:
    """The sum of a loss over the scored tokens of a batch, and their scores as `score_tokens` gives
    them; it is the sum alone that has a gradient, and none with respect to `given_RM`.
    """
    parts = _parts(policy, hidden_RMD, rows, temperature, allowed_ZV)
    loss_N, scores = _on_each(functools.partial(_loss_in_chunks, loss), *parts, given_RM)
    return jnp.sum(loss_N), scores  # of each device


def _parts(
    policy: Decoder, hidden_RMD: Array, rows: Rows, temperature: Array, allowed_ZV: Array | None
) -> tuple[_Head, _Tokens]:
    role_RM = jnp.zeros_like(rows.target_RM) if rows.role_RM is None else rows.role_RM
    head = _Head(*policy.head(hidden_RMD.dtype), temperature, allowed_ZV)
    return head, _Tokens(hidden_RMD, rows.target_RM, role_RM, rows.mask_RM)


def _on_each(function: Any, head: _Head, *by_token: Any) -> Any:
    """A function of a split axis, a head and tokens, on each device that has a part of a batch."""
    if not (axes := _batch_axes()):
        return function(None, head, *by_token)
    split = "fsdp" if "fsdp" in axes else None
    by_row, whole = PartitionSpec(axes), PartitionSpec()
    by_head = _Head(whole, PartitionSpec(None, split), whole, whole)  # type: ignore[arg-type]
    apart = jax.shard_map(
        functools.partial(function, split),
        in_specs=(by_head, *(by_row for _ in by_token)),
        out_specs=by_row,
        axis_names=set(axes),
        check_vma=False,
    )
    return apart(head, *by_token)


def _batch_axes() -> tuple[str, ...]:
    """The mesh axes that share a batch, under `jax.set_mesh`."""
    return tuple(axis for axis in ("data", "fsdp") if axis_size(axis) > 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(split: str | None, head: _Head, tokens: _Tokens) -> Scores:
    """`split`: the mesh axis that the sink's width is split over, in a `shard_map`; None: none."""
    return _forward(split, head, tokens)[0]


class _Kept(NamedTuple):
    """What the backward pass needs; the log-sum-exp is that of the logits at the temperature."""

    head: _Head
    tokens: _Tokens
    lse_RM: Array
    entropy_RM: Array


def _forward(split: str | None, head: _Head, tokens: _Tokens) -> tuple[Scores, _Kept]:
    size, used = _chunks(tokens.mask_RM)

    def score(c: Array, done: _Scored) -> _Scored:
        chunk = jax.tree.map(lambda x: _part(x, c, size), tokens)
        new = _scored(_logits(head, chunk), chunk)
        return jax.tree.map(lambda x, y: _put(x, y, c), done, new)

    scores, lse_RM = jax.lax.fori_loop(0, used, score, _unscored(tokens))
    return scores, _Kept(head, tokens, lse_RM, scores.entropy_RM)


class _Scored(NamedTuple):
    """Scores, and the log-sum-exp of the logits at the temperature."""

    scores: Scores
    lse_RM: Array


def _unscored(tokens: _Tokens) -> _Scored:
    zero_RM = jnp.zeros(tokens.mask_RM.shape, jnp.float32)
    return _Scored(Scores(zero_RM, zero_RM, zero_RM > 0), zero_RM)


def _scored(logits_RCV: Array, chunk: _Tokens) -> _Scored:
    top_RC = jnp.max(logits_RCV, axis=-1)
    below_RCV = logits_RCV - top_RC[..., None]
    weight_RCV = jnp.exp(below_RCV)
    total_RC = jnp.sum(weight_RCV, axis=-1)
    # What is forbidden has no weight; its -inf must not meet that zero.
    mean_RC = jnp.sum(jnp.where(weight_RCV > 0, weight_RCV * below_RCV, 0.0), axis=-1)
    chosen_RC = jnp.sum(jnp.where(_one_hot(chunk, below_RCV), below_RCV, 0.0), axis=-1)
    log_RC = jnp.log(total_RC)
    scores = Scores(chosen_RC - log_RC, log_RC - mean_RC / total_RC, chosen_RC >= 0)
    return _Scored(scores, top_RC + log_RC)


def _backward(split: str | None, kept: _Kept, pushed: Scores) -> tuple[_Head, _Tokens]:
    head, tokens = kept.head, kept.tokens
    size, used = _chunks(tokens.mask_RM)
    by_token = (tokens, kept.lse_RM, kept.entropy_RM, pushed.logp_RM, pushed.entropy_RM)

    def push(c: Array, sums: _Sums) -> _Sums:
        chunk, lse, entropy, *pushed = jax.tree.map(lambda x: _part(x, c, size), by_token)
        grad_RCV = _grad(_logits(head, chunk), chunk, lse, entropy, *pushed)
        return _summed(sums, grad_RCV, head, chunk, c)

    return _returned(split, jax.lax.fori_loop(0, used, push, _no_sums(head, tokens)))


def _grad(
    logits_RCV: Array,
    chunk: _Tokens,
    lse_RC: Array,
    entropy_RC: Array,
    logp_push_RC: Array,
    entropy_push_RC: Array,
) -> Array:
    """The gradient by logits: `d logp = onehot - p` and `d entropy = -p (log p + entropy)`."""
    rest = (lse_RC, entropy_RC, logp_push_RC, entropy_push_RC)
    lse, entropy, logp_push, entropy_push = (x[..., None] for x in rest)
    logp_RCV = logits_RCV - lse
    p_RCV = jnp.exp(logp_RCV)
    spread_RCV = jnp.where(p_RCV > 0, p_RCV * (logp_RCV + entropy), 0.0)
    onehot_RCV = _one_hot(chunk, logp_RCV).astype(jnp.float32)
    return logp_push * (onehot_RCV - p_RCV) - entropy_push * spread_RCV


class _Sums(NamedTuple):
    """Gradients of hidden states and of the head."""

    hidden_RMD: Array
    head_VD: Array


def _no_sums(head: _Head, tokens: _Tokens) -> _Sums:
    return _Sums(jnp.zeros_like(tokens.hidden_RMD), jnp.zeros(head.copy_VD.shape, jnp.float32))


def _summed(sums: _Sums, grad_RCV: Array, head: _Head, chunk: _Tokens, c: Array) -> _Sums:
    """With those of a chunk, from its gradient by logits."""
    grad_RCV = (grad_RCV / head.temperature).astype(head.copy_VD.dtype)
    back_RCD = product("rcv,vd->rcd", grad_RCV, head.copy_VD).astype(sums.hidden_RMD.dtype)
    head_VD = sums.head_VD + product("rcv,rcd->vd", grad_RCV, chunk.hidden_RMD)
    return _Sums(_put(sums.hidden_RMD, back_RCD, c), head_VD)


def _returned(split: str | None, sums: _Sums) -> tuple[_Head, _Tokens]:
    """The cotangents of a head and of tokens."""
    head_VD = sums.head_VD
    if split is not None:
        # Along the first axis: rows of the transpose are each in one piece.
        head_VD = jax.lax.psum_scatter(head_VD.T, split, tiled=True).T
    return _Head(None, head_VD, None, None), _Tokens(sums.hidden_RMD, None, None, None)  # type: ignore[arg-type]


_in_chunks.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_in_chunks(
    loss: TokenLoss, split: str | None, head: _Head, tokens: _Tokens, given_RM: Any
) -> tuple[Array, Scores]:
    """The sum, float32 `[1]`, and the scores."""
    scores = _forward(split, head, tokens)[0]
    return _sum(loss, tokens.mask_RM, given_RM, *scores[:2])[None], scores


def _sum(loss: TokenLoss, mask: Array, given: Any, logp: Array, entropy: Array) -> Array:
    logp, entropy = (jnp.where(mask, x, 0.0) for x in (logp, entropy))
    return jnp.sum(loss(logp, entropy, mask, given))


def _loss_forward(
    loss: TokenLoss, split: str | None, head: _Head, tokens: _Tokens, given_RM: Any
) -> tuple[tuple[Array, Scores], _Sums]:
    size, used = _chunks(tokens.mask_RM)

    def push(c: Array, done: tuple[Scores, _Sums]) -> tuple[Scores, _Sums]:
        chunk, given_RC = jax.tree.map(lambda x: _part(x, c, size), (tokens, given_RM))
        logits_RCV = _logits(head, chunk)
        new, lse_RC = _scored(logits_RCV, chunk)
        of_chunk = functools.partial(_sum, loss, chunk.mask_RM, given_RC)
        pushed = jax.grad(of_chunk, (0, 1))(*new[:2])
        grad_RCV = _grad(logits_RCV, chunk, lse_RC, new.entropy_RM, *pushed)
        scores = jax.tree.map(lambda x, y: _put(x, y, c), done[0], new)
        return scores, _summed(done[1], grad_RCV, head, chunk, c)

    none = _unscored(tokens).scores, _no_sums(head, tokens)
    scores, sums = jax.lax.fori_loop(0, used, push, none)
    return (_sum(loss, tokens.mask_RM, given_RM, *scores[:2])[None], scores), sums


def _loss_backward(
    loss: TokenLoss, split: str | None, sums: _Sums, pushed: tuple[Array, Scores]
) -> tuple[_Head, _Tokens, None]:
    sums = _Sums(*((pushed[0][0] * x.astype(jnp.float32)).astype(x.dtype) for x in sums))
    return *_returned(split, sums), None


_loss_in_chunks.defvjp(_loss_forward, _loss_backward)


def _chunks(mask_RM: Array) -> tuple[int, Array]:
    """How many tokens of a row are in a chunk, and how many chunks until the last scored token."""
    count, length = mask_RM.shape
    most = max(1, min(SCORED_CHUNK, SCORED_TOKENS // count))
    size = next(c for c in range(min(length, most), 0, -1) if length % c == 0)
    used = jnp.where(jnp.any(mask_RM, axis=0), jnp.arange(length) // size + 1, 0)
    return size, jnp.max(used)


def _part(x_RM: Array, chunk: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x_RM, chunk * size, size, axis=1)


def _put(x_RM: Array, part_RC: Array, chunk: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x_RM, part_RC, chunk * part_RC.shape[1], axis=1)


def _logits(head: _Head, chunk: _Tokens) -> Array:
    """At the temperature, float32; of what a grammar forbids minus infinity."""
    logits_RCV = product("rcd,vd->rcv", chunk.hidden_RMD, head.copy_VD) / head.temperature
    if head.allowed_ZV is None:
        return logits_RCV
    return only(logits_RCV, head.allowed_ZV[chunk.role_RM])


def _one_hot(chunk: _Tokens, like_RCV: Array) -> Array:
    place_RCV = jax.lax.broadcasted_iota(chunk.target_RM.dtype, like_RCV.shape, 2)
    return place_RCV == chunk.target_RM[..., None]
