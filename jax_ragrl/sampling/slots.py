"""Jitted decoding in slots: rows of unequal age share a batch, and each has its own context.

Two sets of caches are on the devices:
  - pages of kept contexts, whose keys and values were computed once (`sampling/contexts.py`);
  - slots, the rows that are being decoded. A slot starts as a copy of a kept context.

These programs work on them: `start_contexts` and `extend_contexts` (prefill of a chunk),
`load_slots`, `decode_slots` and `store_slots`. `sampling/engine.py` decides which is next.

A slot runs the model on its latest token before it samples the next one, so a context of `n` tokens
has the keys and values of `n - 1` of them. Tokens and keys of random numbers equal those
of a batch (`sampling/decode.py`), because a token depends on its prompt, key and position alone.

Shapes: D devices with S slots each give B = D S rows; the slot numbers of one call are `[D, N]`,
below S on each device, and its page numbers `[D, N, T]`, T pages per context, below the pages of a
device. A larger number stands for padding.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import KVCache, init_cache
from jax_ragrl.models.layer import write_cache
from jax_ragrl.models.prefix_attention import VisibleKeys
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.sharding import LogicalAxes, constrain, target_platform
from jax_ragrl.sampling.contexts import PAGE
from jax_ragrl.sampling.decode import (
    Grammar,
    check_stops,
    follow_grammar,
    mask_forbidden,
    mask_padding,
    padding_of,
    rows_minor,
    sample_token,
    scaled,
    where_live,
)
from jax_ragrl.types import Tensor

# The most tokens that a program adds to each row before they are appended to its context. A
# multiple of `CHECK_STRIDE`.
MAX_STEPS = 64
# The fields of `SlotState` with one number per row that change with a token.
ROW_VECTORS = ("rows", "done_B", "stop_state_B", "removed_B")
# The logical axes of arrays by their number of axes: keys and values are `[B, K, C, F]` in slots,
# and `[D, M, K, PAGE, F]` in M pages per device. (With one axis `D M`, XLA would copy all pages.)
AXES: dict[int, LogicalAxes] = {
    1: ("batch",),
    2: ("batch", None),
    4: ("batch", "kv", None, None),
    5: ("batch", None, "kv", None, None),
}


def decode_name(slots: int, capacity: int, kind: str) -> str:
    """Returns the name by which a run reports a program that decodes.

    Args:
      slots: slots per device.
      capacity: tokens per context.
      kind: of `Grammar.describe`.
    """
    return f"sampler of {slots} slots x {capacity}{kind}"


def prefill_name(contexts: int, length: int, capacity: int) -> str:
    """Returns the name by which a run reports a program that prefills a chunk.

    Args:
      contexts: contexts per device.
      length: tokens of the chunk.
      capacity: tokens per context.
    """
    return f"prefill {contexts} x {length} of {capacity}"


class SlotRows(NamedTuple):
    """The parameters of rows: what `Prompts` holds, with one row per prompt.

    Fields:
      last_B: int32, the latest token, whose keys and values are not in the cache yet.
      length_B: int32 tokens of the prompt.
      seed_B, sibling_B: the keys of the random numbers, as in `Prompts`.
      temperature_B, top_p_B, limit_B: as in `Prompts`.
      grammar_state_B: as in `Prompts`.
    """

    last_B: Tensor
    length_B: Tensor
    seed_B: Tensor
    sibling_B: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    limit_B: Tensor
    grammar_state_B: Tensor = None


class SlotState(NamedTuple):
    """Slots on the devices.

    Fields:
      cache: keys and values `[B, K, C, F]` per layer, for contexts of up to C tokens.
      rows: the parameters of each slot; `last_B` and `grammar_state_B` follow the new tokens.
      done_B: bool, whether a slot's row has ended, or the slot is empty.
      ids_BT, logps_BT, count_B, removed_B: as in `decode.Samples`.
      stop_state_B: as in `decode.DecodeState`.
    """

    cache: KVCache
    rows: SlotRows
    done_B: Array
    ids_BT: Array
    logps_BT: Array
    count_B: Array
    stop_state_B: Array
    removed_B: Array | None


class DecodeLimits(NamedTuple):
    """The reasons for which a program that decodes ends before its rows do.

    Fields:
      refill_at_D: int32: it ends when the devices have at most the sum of these numbers of live
        rows, or a device has no live row; -1 for a device without a waiting row, which does not
        count.
      shrink_at: int32 scalar: it ends when no device has more live rows.
      steps: int32 scalar, at most `MAX_STEPS`: it ends after this number of steps.
    """

    refill_at_D: Tensor
    shrink_at: Tensor
    steps: Tensor


@in_order
@functools.partial(
    jax.jit, static_argnames=("config", "rows", "capacity", "max_new_tokens", "is_strict")
)
def empty_slots(
    config: DecoderConfig, rows: int, capacity: int, max_new_tokens: int, *, is_strict: bool
) -> SlotState:
    """Returns empty slots.

    Args:
      config: the sizes of the decoder.
      rows: slots on all devices.
      capacity: tokens per context.
      max_new_tokens: the maximum of new tokens of any row.
      is_strict: whether the rows follow an automaton.
    """
    zeros, ones = jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.float32)
    nothing = SlotRows(
        last_B=zeros,
        length_B=zeros + 1,
        seed_B=jnp.zeros(rows, jnp.uint32),
        sibling_B=zeros,
        temperature_B=ones,
        top_p_B=ones,
        limit_B=zeros,
        grammar_state_B=zeros if is_strict else None,
    )
    state = _without_tokens(init_cache(config, rows, capacity), nothing, max_new_tokens)
    return _fix_layout(state._replace(done_B=jnp.ones(rows, bool)))


def _without_tokens(cache: KVCache, rows: SlotRows, max_new_tokens: int) -> SlotState:
    """Returns slots whose rows have no new tokens yet."""
    zeros = jnp.zeros_like(rows.last_B)
    return SlotState(
        cache=cache,
        rows=rows,
        done_B=jnp.zeros(zeros.shape, bool),
        ids_BT=jnp.zeros((*zeros.shape, max_new_tokens), jnp.int32),
        logps_BT=jnp.zeros((*zeros.shape, max_new_tokens), jnp.float32),
        count_B=zeros,
        stop_state_B=jnp.zeros(zeros.shape, jnp.uint8),
        removed_B=None if rows.grammar_state_B is None else jnp.zeros(zeros.shape, jnp.float32),
    )


@in_order
@functools.partial(jax.jit, static_argnames=("config", "devices", "pages"))
def empty_pages(config: DecoderConfig, devices: int, pages: int) -> KVCache:
    """Returns room for kept contexts: a number of pages on each of some devices."""
    page = init_cache(config, 1, PAGE)
    pool = jax.tree.map(lambda x: jnp.zeros((devices, pages, *x.shape[1:]), x.dtype), page)
    return _fix_layout(pool)


@in_order
@functools.partial(jax.jit, donate_argnames=("pages",))
def start_contexts(model: SplitModel, pages: KVCache, write_DNT: Array, ids_BL: Array) -> KVCache:
    """Runs the first chunk of tokens of some contexts and stores their keys and values.

    Args:
      model: a split `Decoder`.
      pages: the kept contexts; donated.
      write_DNT: int32 numbers of the pages of the chunk.
      ids_BL: int32 tokens of the chunk, B = D N. Padding on the right is stored too, at places that
        no query reads before another token is stored there.
    """
    positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1])[None], ids_BL.shape)
    # Plain causal attention, for which accelerators have kernels that store no scores.
    _, cache = model.merge()(ids_BL, positions_BL, None, return_cache=True)
    missing = write_DNT.shape[2] * PAGE - ids_BL.shape[1]
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))), cache)
    return _fix_layout(_put_pages(pages, write_DNT, cache))


@in_order
@functools.partial(jax.jit, donate_argnames=("pages",))
def extend_contexts(
    model: SplitModel,
    pages: KVCache,
    read_DNT: Array,
    write_DNT: Array,
    ids_BL: Array,
    start_B: Array,
) -> KVCache:
    """Runs a later chunk of tokens of some contexts and stores their keys and values.

    Args:
      model, pages, ids_BL: as in `start_contexts`.
      read_DNT: int32 numbers of the pages of each context before the chunk.
      write_DNT: int32 numbers of the pages of the chunk, at their places in the context. A page
        that had tokens before is written as a whole, perhaps to another number.
      start_B: int32 tokens that each context has before the chunk.
    """
    # 1. The contexts so far; padding reads any page and stores nothing.
    cache = _fix_layout(_contexts_at(pages, read_DNT))
    # 2. Each token sees its context and the chunk up to itself.
    positions_BL = start_B[:, None] + jnp.arange(ids_BL.shape[1])[None]
    mask_BLC, positions_BC = _visible(cache, positions_BL)
    _, cache = model.merge()(ids_BL, positions_BL, mask_BLC, cache, start_B, positions_BC)
    return _fix_layout(_put_pages(pages, write_DNT, cache))


@in_order
@functools.partial(jax.jit, donate_argnames=("state",))
def load_slots(
    state: SlotState, pages: KVCache, read_DNT: Array, target_DN: Array, rows: SlotRows
) -> SlotState:
    """Puts new rows in some slots, each with a copy of a kept context.

    Args:
      state: the slots; donated.
      pages: the kept contexts.
      read_DNT: int32 numbers of the pages of each context.
      target_DN: int32 numbers of the slots.
      rows: the parameters of the new rows, `[D N]` each.
    """
    # Everything about the old row of a slot is replaced.
    new = _without_tokens(_contexts_at(pages, read_DNT), rows, state.ids_BT.shape[1])
    return _fix_layout(_put(state, target_DN, new))


@in_order
@functools.partial(jax.jit, donate_argnames=("pages",))
def store_slots(pages: KVCache, cache: KVCache, source_DN: Array, write_DNT: Array) -> KVCache:
    """Keeps the contexts of some slots.

    Args:
      pages: the kept contexts; donated.
      cache: the keys and values of the slots.
      source_DN: int32 numbers of the slots.
      write_DNT: int32 numbers of the pages to write, at their places in the contexts.
    """
    return _fix_layout(_put_pages(pages, write_DNT, _rows_at(cache, source_DN)))


@in_order
@jax.jit
def resize_slots(state: SlotState, number_DN: Array) -> SlotState:
    """Returns some of the slots of each device, int32 `[D, N]` numbers, in this order.

    A number past the end stands for an empty slot.
    """
    count = len(state.done_B) // len(number_DN)
    slots = _rows_at(state, number_DN)
    is_empty_B = (number_DN >= count).reshape(-1)
    return _fix_layout(slots._replace(done_B=slots.done_B | is_empty_B))


@in_order
@functools.partial(jax.jit, static_argnames=("capacity",))
def cut_contexts(cache: KVCache, capacity: int) -> KVCache:
    """Returns the first `capacity` tokens of the contexts of all slots."""
    return _fix_layout(jax.tree.map(lambda x: x[:, :, :capacity], cache))


@in_order
@functools.partial(jax.jit, static_argnames=("use_top_p", "stride"), donate_argnames=("state",))
def decode_slots(
    model: SplitModel,
    state: SlotState,
    grammar: Grammar,
    limits: DecodeLimits,
    *,
    use_top_p: bool = True,
    stride: int = 1,
) -> tuple[SlotState, Array]:
    """Samples tokens until rows can be replaced, few rows are live, or there is no room.

    Args:
      model: a split `Decoder`.
      state: the slots; donated.
      grammar: the constraints of all rows.
      limits: when the loop ends before the rows do.
      use_top_p, stride: as in `decode.generate`.

    Returns:
      The slots, and the number of decode steps, int32 scalar.
    """
    decoder, contexts = model.merge(), state.cache
    # 1. The keys of rows, and the tokens that each context has.
    keys_B = _row_keys(state.rows)
    start_B, capacity = _place(state), contexts.k[0].shape[2]
    # 2. The weights of each layer, cut out of their stack before the loop.
    layers = decoder.unstacked_layers(fuse=target_platform() == "gpu")
    step = functools.partial(_step, decoder, layers, grammar, keys_B, start_B, use_top_p)

    # 3. Decode `stride` tokens between two checks.
    def is_worth_continuing(carry: tuple[SlotState, Array]) -> Array:
        s, t = carry
        live_D = jnp.sum(~s.done_B.reshape(len(limits.refill_at_D), -1), axis=-1)
        has_room = (t < limits.steps) & ~jnp.any(~s.done_B & (start_B + t >= capacity))
        is_due = is_refill_due(live_D, limits.refill_at_D)
        return ~is_due & jnp.any(live_D > limits.shrink_at) & has_room

    def decode_stride(carry: tuple[SlotState, Array]) -> tuple[SlotState, Array]:
        s, t = carry
        return jax.lax.fori_loop(0, stride, lambda i, s: step(s, t + i), s), t + stride

    state = state._replace(
        cache=init_cache(decoder.config, len(start_B), MAX_STEPS, prefix=contexts)
    )
    state, t = jax.lax.while_loop(is_worth_continuing, decode_stride, (state, jnp.int32(0)))
    # 4. Append the new keys and values. Keys of steps after the end of a row are stored too, at
    # places that no query reads before another token is stored there.
    return _fix_layout(state._replace(cache=_append(contexts, state.cache, start_B))), t


def is_refill_due(live_D: Array, refill_at_D: Array) -> Array:
    """Returns whether enough slots are free for waiting rows; see `DecodeLimits`.

    The devices with waiting rows are compared as a whole: a program for every device that reaches
    its own number would be one for a few free slots of each.
    """
    waits_D = refill_at_D >= 0
    is_below = jnp.sum(live_D - refill_at_D, where=waits_D) <= 0
    return jnp.any(waits_D) & (is_below | jnp.any(waits_D & (live_D == 0)))


def _row_keys(rows: SlotRows) -> Array:
    """Returns one key per row, as in `decode`."""

    def key(seed: Array, sibling: Array) -> Array:
        return jax.random.fold_in(jax.random.key(seed), sibling)

    keys_B: Array = jax.vmap(key)(rows.seed_B, rows.sibling_B)
    return keys_B


def _append(contexts: KVCache, new: KVCache, start_B: Array) -> KVCache:
    """Writes the entries of each row from its place on; those past the end are dropped."""

    def append(old: Array, new: Array) -> Array:
        return write_cache(old, jnp.swapaxes(new, 1, 2), start_B)

    return jax.tree.map(append, contexts, new._replace(prefix=None))


def _place(s: SlotState) -> Array:
    """Returns the place of each row's latest token in its context, int32 `[B]`."""
    return s.rows.length_B + s.count_B - 1


def _step(
    model: Any,
    layers: Any,
    grammar: Grammar,
    keys_B: Array,
    start_B: Array,
    use_top_p: bool,
    s: SlotState,
    t: Array,
) -> SlotState:
    """Runs the model on the latest token of every row and samples the next one.

    Nothing changes in rows that are done, nor in rows without room, which a stride can reach.
    """
    contexts = s.cache.prefix
    assert contexts is not None, "decode_slots puts the contexts there"
    live_B = ~s.done_B & (start_B + t < contexts.k[0].shape[2])
    # 1. Run the model on the latest tokens.
    logits_BV, cache = _next_logits(model, layers, s, contexts, start_B, t)
    logits_BV = rows_minor(scaled(logits_BV, s.rows.temperature_B))
    logits_BV = mask_padding(logits_BV, padding_of(model.config))
    # 2. Sample a token per row among the allowed ones.
    budget_B = s.rows.limit_B - s.count_B
    masked_BV = mask_forbidden(grammar, logits_BV, s.rows.grammar_state_B, budget_B)
    top_p_B = s.rows.top_p_B if use_top_p else None
    ids_B, logps_B = sample_token(masked_BV, s.count_B, s.rows.temperature_B, top_p_B, keys_B)
    state_B, removed_B = follow_grammar(
        grammar, logits_BV, masked_BV, ids_B, (s.rows.grammar_state_B, s.removed_B)
    )
    # 3. Append the tokens of live rows.
    rows = s.rows._replace(last_B=ids_B, grammar_state_B=state_B)
    new = _with_tokens(s, grammar, live_B, ids_B, logps_B)
    new = new._replace(cache=cache, rows=rows, removed_B=removed_B)
    # 4. Rows that are not live keep their old vectors; their columns were not written.
    return new._replace(
        **{name: where_live(live_B, getattr(new, name), getattr(s, name)) for name in ROW_VECTORS}
    )


def _with_tokens(
    s: SlotState, grammar: Grammar, live_B: Array, ids_B: Array, logps_B: Array
) -> SlotState:
    """Returns slots with another token per live row, and which rows it ends."""
    is_stop_B, stop_state_B = check_stops(grammar, ids_B, s.stop_state_B)
    count_B = s.count_B + live_B.astype(jnp.int32)
    at_B = jnp.where(live_B, s.count_B, s.ids_BT.shape[1])
    return s._replace(
        done_B=is_stop_B | (count_B >= s.rows.limit_B),
        ids_BT=_set_columns(s.ids_BT, at_B, ids_B),
        logps_BT=_set_columns(s.logps_BT, at_B, logps_B),
        count_B=count_B,
        stop_state_B=stop_state_B,
    )


def _next_logits(
    model: Any, layers: Any, s: SlotState, contexts: KVCache, start_B: Array, t: Array
) -> tuple[Array, KVCache]:
    """Runs the model on the latest token of each row; entry `t` takes their keys and values.

    All rows write the same entry, although their contexts have different lengths: a write of each
    row at its own place of its context would make a TPU copy all contexts.
    """
    place_B1 = (start_B + t)[:, None]
    context_BC = jnp.zeros_like(place_B1) + jnp.arange(contexts.k[0].shape[2])[None]
    new_BT = start_B[:, None] + jnp.arange(MAX_STEPS)[None]
    hidden_B1D, cache = model(
        s.rows.last_B[:, None],
        place_B1,
        VisibleKeys(start_B, jnp.full_like(start_B, t + 1)),
        s.cache,
        jnp.full_like(start_B, t),
        jnp.concatenate([context_BC, new_BT], axis=-1),
        layers=layers,
    )
    return model.logits(hidden_B1D[:, 0]), cache


def _set_columns(x_BT: Array, at_B: Array, values_B: Array) -> Array:
    """Writes one value per row at its own column; a column past the end drops the value."""
    write = jax.vmap(lambda x_T, at, value: x_T.at[at].set(value, mode="drop"))
    written: Array = write(x_BT, at_B, values_B)
    return written


def _visible(cache: KVCache, place_BL: Array) -> tuple[Array, Array]:
    """Returns which keys queries at some places attend to, bool `[B, L, C]`, and their positions.

    The positions are int32 `[B, C]`.
    """
    key_C = jnp.arange(cache.k[0].shape[2])
    mask_BLC = key_C[None, None, :] <= place_BL[:, :, None]
    return mask_BLC, jnp.broadcast_to(key_C[None], (place_BL.shape[0], len(key_C)))


def _rows_at(tree: Any, number_DN: Array) -> Any:
    """Returns some rows of each device, `[D N, ...]`; a number past the end takes the last row."""

    def take(x: Array) -> Array:
        shards = x.reshape(number_DN.shape[0], -1, *x.shape[1:])
        rows = jax.vmap(lambda shard, number_N: shard.at[number_N].get(mode="clip"))
        return rows(shards, number_DN).reshape(-1, *x.shape[1:])

    return jax.tree.map(take, tree)


def _put(tree: Any, number_DN: Array, rows: Any) -> Any:
    """Writes some rows on each device; those with a number past the end are dropped."""

    def put(x: Array, new: Array) -> Array:
        shards, parts = (
            y.reshape(number_DN.shape[0], -1, *x.shape[1:]) for y in (x, new.astype(x.dtype))
        )
        write = jax.vmap(lambda shard, at_N, part: shard.at[at_N].set(part, mode="drop"))
        return write(shards, number_DN, parts).reshape(x.shape)

    return jax.tree.map(put, tree, rows)


def _contexts_at(pages: Any, number_DNT: Array) -> Any:
    """Returns the contexts that some pages of each device make up, `[D N, K, T PAGE, F]`."""

    def take(x: Array) -> Array:
        read = jax.vmap(lambda shard, number_NT: shard.at[number_NT].get(mode="clip"))
        rows_DNKTPF = jnp.moveaxis(read(x, number_DNT), 3, 2)
        return rows_DNKTPF.reshape(-1, x.shape[2], number_DNT.shape[2] * PAGE, x.shape[4])

    return jax.tree.map(take, pages)


def _put_pages(pages: Any, number_DNT: Array, contexts: Any) -> Any:
    """Writes pages of contexts `[D N, K, T PAGE, F]`; those with a number past the end drop."""

    def put(x: Array, new: Array) -> Array:
        split = new.astype(x.dtype).reshape(*number_DNT.shape[:2], x.shape[2], -1, *x.shape[3:])
        parts_DNTKPF = jnp.moveaxis(split, 3, 2)
        write = jax.vmap(lambda shard, at_NT, part: shard.at[at_NT].set(part, mode="drop"))
        return write(x, number_DNT, parts_DNTKPF)

    return jax.tree.map(put, pages, contexts)


def _fix_layout(arrays: Any) -> Any:
    """Gives all arrays one sharding whichever program returns them, so each compiles only once."""
    return jax.tree.map(lambda x: constrain(x, AXES[x.ndim]), arrays)
