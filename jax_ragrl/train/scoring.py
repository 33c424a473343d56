"""How likely written tokens were, without the logits of all of them at once.

Logits are made for a chunk of tokens at a time, and again in the backward pass. What is kept of a
token is its log-sum-exp and its entropy: its probabilities follow from them, and so does the
gradient, in one pass over the logits of a chunk.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jax_ragrl.batch import Rows
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.product import product
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
    head = _Head(*policy.head(hidden_RMD.dtype), temperature, allowed_ZV)
    role_RM = jnp.zeros_like(rows.target_RM) if rows.role_RM is None else rows.role_RM
    tokens = _Tokens(hidden_RMD, rows.target_RM, role_RM, rows.mask_RM)
    if not (axes := _batch_axes()):
        return _in_chunks(None, head, tokens)
    split = "fsdp" if "fsdp" in axes else None
    by_row, whole = PartitionSpec(axes), PartitionSpec()
    by_head = _Head(whole, PartitionSpec(None, split), whole, whole)  # type: ignore[arg-type]
    apart = jax.shard_map(
        functools.partial(_in_chunks, split),
        in_specs=(by_head, by_row),
        out_specs=by_row,
        axis_names=set(axes),
        check_vma=False,
    )
    return apart(head, tokens)


def _batch_axes() -> tuple[str, ...]:
    """The mesh axes that share a batch, under `jax.set_mesh`."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return tuple(axis for axis in ("data", "fsdp") if sizes.get(axis, 1) > 1)


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

    def score(c: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        chunk = jax.tree.map(lambda x: _part(x, c, size), tokens)
        logits_RCV = _logits(head, chunk)
        top_RC = jnp.max(logits_RCV, axis=-1)
        below_RCV = logits_RCV - top_RC[..., None]
        weight_RCV = jnp.exp(below_RCV)
        total_RC = jnp.sum(weight_RCV, axis=-1)
        # What is forbidden has no weight; its -inf must not meet that zero.
        mean_RC = jnp.sum(jnp.where(weight_RCV > 0, weight_RCV * below_RCV, 0.0), axis=-1)
        chosen_RC = jnp.sum(jnp.where(_one_hot(chunk, below_RCV), below_RCV, 0.0), axis=-1)
        log_RC = jnp.log(total_RC)
        new = (chosen_RC - log_RC, log_RC - mean_RC / total_RC, chosen_RC >= 0, top_RC + log_RC)
        return tuple(_put(x, y, c) for x, y in zip(done, new, strict=True))

    zero_RM = jnp.zeros(tokens.mask_RM.shape, jnp.float32)
    none = (zero_RM, zero_RM, zero_RM > 0, zero_RM)
    logp_RM, entropy_RM, likeliest_RM, lse_RM = jax.lax.fori_loop(0, used, score, none)
    scores = Scores(logp_RM, entropy_RM, likeliest_RM)
    return scores, _Kept(head, tokens, lse_RM, entropy_RM)


def _backward(split: str | None, kept: _Kept, pushed: Scores) -> tuple[_Head, _Tokens]:
    """From `d logp = onehot - p` and `d entropy = -p (log p + entropy)`, by logits."""
    head, tokens = kept.head, kept.tokens
    size, used = _chunks(tokens.mask_RM)
    by_token = (tokens, kept.lse_RM, kept.entropy_RM, pushed.logp_RM, pushed.entropy_RM)

    def push(c: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden_RMD, head_VD = sums
        chunk, *rest = jax.tree.map(lambda x: _part(x, c, size), by_token)
        lse, entropy, logp_push, entropy_push = (x[..., None] for x in rest)
        logp_RCV = _logits(head, chunk) - lse
        p_RCV = jnp.exp(logp_RCV)
        spread_RCV = jnp.where(p_RCV > 0, p_RCV * (logp_RCV + entropy), 0.0)
        onehot_RCV = _one_hot(chunk, logp_RCV).astype(jnp.float32)
        grad_RCV = (logp_push * (onehot_RCV - p_RCV) - entropy_push * spread_RCV) / head.temperature
        grad_RCV = grad_RCV.astype(head.copy_VD.dtype)
        back_RCD = product("rcv,vd->rcd", grad_RCV, head.copy_VD).astype(hidden_RMD.dtype)
        head_VD = head_VD + product("rcv,rcd->vd", grad_RCV, chunk.hidden_RMD)
        return _put(hidden_RMD, back_RCD, c), head_VD

    none = (jnp.zeros_like(tokens.hidden_RMD), jnp.zeros(head.copy_VD.shape, jnp.float32))
    hidden_RMD, head_VD = jax.lax.fori_loop(0, used, push, none)
    if split is not None:
        # Along the first axis: rows of the transpose are each in one piece.
        head_VD = jax.lax.psum_scatter(head_VD.T, split, tiled=True).T
    return _Head(None, head_VD, None, None), _Tokens(hidden_RMD, None, None, None)  # type: ignore[arg-type]


_in_chunks.defvjp(_forward, _backward)


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
