"""Jitted decoding: prompts are prefilled once, siblings share the prompt's cache, no host sync.

`start_decode` runs every prompt once; `decode` repeats `_decode_step`, one token per row, until the
cache is full, every row is done, or so few prompts are live that a smaller batch is cheaper.

Invariant: a token depends on its own prompt, key and position alone. Keys are folded from
(seed of the row, sibling, position), so a question gets the same tokens in any batch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import KVCache, init_cache
from jax_ragrl.models.prefix_attention import VisibleKeys
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.sharding import constrain, target_platform
from jax_ragrl.sampling.grammar import allowed_tokens, next_states, removed_mass
from jax_ragrl.sampling.pages import KeptPrefix
from jax_ragrl.text.automaton import TokenAutomaton
from jax_ragrl.types import Tensor

# Decode steps between checks for early stopping, on a GPU, whose host waits at each check. A CPU
# and a TPU check after every step.
CHECK_STRIDE = 16
# A vocabulary of more than FLAT_SAMPLING_LIMIT tokens is sampled in two levels, first one of up to
# SAMPLING_BLOCKS blocks of tokens, then a token of that block. A block is a multiple of SUBLANES
# tokens, the tile of a TPU, which otherwise copies all logits to cut them into blocks.
FLAT_SAMPLING_LIMIT, SAMPLING_BLOCKS, SUBLANES = 4096, 128, 8


class Prompts(NamedTuple):
    """A padded batch of prompts, the keys of their rows and their sampling parameters.

    Fields:
      length_B: int32 tokens of each prompt; 0 marks a prompt that is padding.
      seed_BW: uint32 seeds of the sampling keys of W rows per prompt.
      sibling_BW: int32 sibling numbers, folded into the keys; -1 marks a row that is padding.
      temperature_B: float32; 0 is greedy.
      top_p_B: float32; 1 switches nucleus sampling off.
      limit_B: int32 maximum of new tokens.
      grammar_state_B: int32 state of `Grammar.automaton` before the first new token; None without
        an automaton.
    """

    length_B: Tensor
    seed_BW: Tensor
    sibling_BW: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    limit_B: Tensor
    grammar_state_B: Tensor = None


class Samples(NamedTuple):
    """New tokens of `B * W` rows; the rows of a prompt are adjacent.

    Fields:
      ids_BT: int32 token ids, 0 past the end of a row.
      logps_BT: float32 log-probabilities at the sampling temperature.
      count_B: int32 tokens of each row, its stop token included.
      removed_B: float32, the probability that the automaton's mask removed, summed over the tokens
        of each row (see `removed_mass`); None without an automaton.
    """

    ids_BT: Array
    logps_BT: Array
    count_B: Array
    removed_B: Array | None = None


class DecodeState(NamedTuple):
    """The carry of the decoding loop; `ids_BT` to `count_B` and `removed_B` as in `Samples`.

    Fields:
      t: int32 scalar, decode steps so far; a row that is done has fewer tokens.
      cache: keys and values of the new tokens; without its `prefix` between programs, because the
        prefix cache never changes and is passed separately.
      logits_BV: logits of the next token, see `_stored`.
      done_B: bool, whether a row has ended.
      stop_state_B: uint8 state of each row in the stop-string automaton `Grammar.stop_SV`.
      grammar_state_B: int32 state of each row in `Grammar.automaton`; None without one.
    """

    t: Array
    cache: KVCache
    logits_BV: Array
    done_B: Array
    ids_BT: Array
    logps_BT: Array
    count_B: Array
    stop_state_B: Array
    grammar_state_B: Array | None = None
    removed_B: Array | None = None

    def samples(self) -> Samples:
        return Samples(self.ids_BT, self.logps_BT, self.count_B, self.removed_B)


class Grammar(NamedTuple):
    """Constraints on the output of a batch: which tokens are allowed, and what ends a row.

    Fields:
      stop_ids_S: int32 ids that end a row; an array argument, so new ids compile nothing.
      allowed_V: bool, the allowed tokens; None allows all.
      stop_SV: uint8 transition table of the stop-string automaton (`text.stops.stop_table`); its
        last state ends the row. None if there are no stop strings.
      automaton: the language of the actions, in place of `allowed_V`; None without one.
    """

    stop_ids_S: Tensor
    allowed_V: Tensor | None = None
    stop_SV: Tensor | None = None
    automaton: TokenAutomaton | None = None

    def describe(self, *, use_top_p: bool) -> str:
        """Returns what distinguishes programs of one shape, for their names."""
        names = ["top-p"] * use_top_p + ["token mask"] * (self.allowed_V is not None)
        if self.stop_SV is not None:
            names.append(f"{len(self.stop_SV)} stop states")
        if self.automaton is not None:
            states, classes = self.automaton.next_SC.shape
            names.append(f"grammar {states} x {classes}")
        return "".join(f", {name}" for name in names)


@in_order
@functools.partial(jax.jit, static_argnames=("slots",))
def start_decode(
    model: SplitModel,
    prompts: Prompts,
    ids_BL: Array,
    kept: KeptPrefix | None = None,
    *,
    slots: int,
) -> tuple[DecodeState, KVCache]:
    """Runs prompts, each once for all of its rows.

    Args:
      ids_BL: int32 tokens of the prompts, padded on the right; with `kept` those that follow the
        kept ones.
      kept: the keys and values of the first tokens; None: every token is run.
      slots: new tokens that the cache holds.

    Returns:
      The state of the rows, which have no tokens yet, and the prefix cache of the prompts.
    """
    decoder = model.merge()
    # 1. The hidden states of the tokens, and the keys and values of each prompt.
    positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1])[None], ids_BL.shape)
    last_B = prompts.length_B - 1
    if kept is None:
        # Padding is on the right, so plain causal attention hides it without a mask.
        hidden_BLD, prefix = decoder(ids_BL, positions_BL, None, return_cache=True)
    else:
        positions_BL = positions_BL + kept.length_B[:, None]
        # A cache has a prefix: here one key, which no token attends to.
        key_BS = jnp.broadcast_to(jnp.arange(-1, kept.size), (len(ids_BL), 1 + kept.size))
        mask_BLS = (key_BS[:, None] >= 0) & (key_BS[:, None] <= positions_BL[:, :, None])
        nothing = init_cache(decoder.config, len(ids_BL), 1)
        place = kept.cache()._replace(prefix=nothing), kept.length_B, key_BS
        hidden_BLD, prefix = decoder(ids_BL, positions_BL, mask_BLS, *place)
        prefix = prefix._replace(prefix=None)
        last_B = last_B - kept.length_B
    # 2. The logits after the last token.
    last_B11 = jnp.maximum(last_B, 0)[:, None, None]
    logits_BV = decoder.logits(jnp.take_along_axis(hidden_BLD, last_B11, axis=1)[:, 0])
    # 3. The rows.
    width, batch = prompts.sibling_BW.shape[1], prompts.sibling_BW.size
    is_strict = prompts.grammar_state_B is not None
    state = DecodeState(
        t=jnp.int32(0),
        cache=init_cache(decoder.config, batch, slots),
        logits_BV=jnp.repeat(_stored(logits_BV, prompts.temperature_B), width, axis=0),
        # Rows of padding are done from the start, so they never delay the end of the loop.
        done_B=prompts.sibling_BW.reshape(-1) < 0,
        ids_BT=jnp.zeros((batch, slots), jnp.int32),
        logps_BT=jnp.zeros((batch, slots), jnp.float32),
        count_B=jnp.zeros(batch, jnp.int32),
        stop_state_B=jnp.zeros(batch, jnp.uint8),
        grammar_state_B=jnp.repeat(prompts.grammar_state_B, width) if is_strict else None,
        removed_B=jnp.zeros(batch, jnp.float32) if is_strict else None,
    )
    return _fix_layout(state, prefix)


@in_order
@functools.partial(jax.jit, static_argnames=("use_top_p", "stride"), donate_argnames=("state",))
def decode(
    model: SplitModel,
    prompts: Prompts,
    grammar: Grammar,
    shrink_at_W: Array,
    state: DecodeState,
    prefix: KVCache,
    *,
    use_top_p: bool = True,
    stride: int = 1,
) -> DecodeState:
    """Samples tokens until the cache is full or enough rows are done.

    Args:
      shrink_at_W: int32, per device: the loop ends early when no device has more than this number
        of prompts with a live row.
      state: the state to continue from; its buffers are donated.
      prefix: the prefix cache of the prompts; not donated.
      use_top_p: whether any row has a `top_p` below 1; False leaves the nucleus filter out.
      stride: decode steps between checks for early stopping; it changes no result.
    """
    decoder = model.merge()
    state = state._replace(cache=state.cache._replace(prefix=prefix))
    state = state._replace(logits_BV=rows_minor(state.logits_BV))
    slots, width = state.ids_BT.shape[1], prompts.seed_BW.shape[1]
    # 1. One entry per row: the prompt's parameters, and a key of (seed, sibling).
    rows = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), prompts)
    keys_B = jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(
        prompts.seed_BW.reshape(-1), prompts.sibling_BW.reshape(-1)
    )
    # 2. The weights of each layer, cut out of their stack before the loop. XLA for GPUs fuses
    # narrow matmuls itself, and would concatenate their weights in every step.
    layers = decoder.unstacked_layers(fuse=target_platform() == "gpu")
    step = functools.partial(_decode_step, decoder, layers, rows, keys_B, grammar, use_top_p)

    # 3. Decode `stride` tokens between two checks.
    def is_worth_continuing(s: DecodeState) -> Array:
        live_WN = jnp.any(~s.done_B.reshape(shrink_at_W.shape[0], -1, width), axis=-1)
        return jnp.any(jnp.sum(live_WN, axis=-1) > shrink_at_W)

    def decode_stride(s: DecodeState) -> DecodeState:
        return jax.lax.fori_loop(0, stride, lambda _, s: step(s), s)

    state = jax.lax.while_loop(
        lambda s: (s.t < slots) & is_worth_continuing(s), decode_stride, state
    )
    return _fix_layout(state, prefix)[0]


def _fix_layout(state: DecodeState, prefix: KVCache) -> tuple[DecodeState, KVCache]:
    """Gives both one sharding whichever program returns them, so the next compiles only once."""
    names = {0: (), 1: ("batch",), 2: ("batch", None), 4: ("batch", "kv", None, None)}
    state = state._replace(cache=state.cache._replace(prefix=None))
    # The logits alone of all arrays of rank 2 are split over the tensor axis too.
    logits_BV = constrain(state.logits_BV, ("batch", "vocab"))
    state, prefix = jax.tree.map(lambda x: constrain(x, names[x.ndim]), (state, prefix))
    return state._replace(logits_BV=logits_BV), prefix


def _decode_step(
    model: Any,
    layers: Any,
    rows: Prompts,
    keys_B: Array,
    grammar: Grammar,
    use_top_p: bool,
    s: DecodeState,
) -> DecodeState:
    """Samples token `t` of every row and computes the logits of the next token.

    Nothing is written to rows that are done, nor past the end of the cache, which a stride that
    does not divide the cache size can reach.
    """
    live_B = ~s.done_B & (s.t < s.ids_BT.shape[1])
    # 1. Sample a token per row among the allowed ones.
    scaled_BV = _loaded(s.logits_BV, rows.temperature_B)
    scaled_BV = logits_BV = mask_padding(scaled_BV, padding_of(model.config))
    if grammar.automaton is not None and s.grammar_state_B is not None:
        allowed_BV = allowed_tokens(grammar.automaton, s.grammar_state_B, rows.limit_B - s.count_B)
        logits_BV = mask_logits(scaled_BV, allowed_BV)
    elif grammar.allowed_V is not None:
        logits_BV = mask_logits(scaled_BV, grammar.allowed_V[None])
    top_p_B = rows.top_p_B if use_top_p else None
    ids_B, logps_B = sample_token(logits_BV, s.t, rows.temperature_B, top_p_B, keys_B)
    # 2. Find rows that end with this token: a stop id, the end of a stop string, or the limit.
    count_B, stop_state_B = s.count_B + live_B.astype(jnp.int32), s.stop_state_B
    done_B = s.done_B | (count_B >= rows.limit_B)
    done_B = done_B | jnp.any(ids_B[:, None] == grammar.stop_ids_S[None], axis=1)
    if grammar.stop_SV is not None:
        # The last column stands for the ids of a vocabulary that is padded beyond the tokenizer's.
        last_column, last_state = grammar.stop_SV.shape[1] - 1, grammar.stop_SV.shape[0] - 1
        stop_state_B = grammar.stop_SV[stop_state_B, jnp.minimum(ids_B, last_column)]
        done_B = done_B | (stop_state_B == last_state)
    # 3. Follow the automaton.
    grammar_state_B, removed_B = s.grammar_state_B, s.removed_B
    if grammar.automaton is not None and grammar_state_B is not None and removed_B is not None:
        new_B = next_states(grammar.automaton, grammar_state_B, ids_B)
        grammar_state_B = jnp.where(live_B, new_B, grammar_state_B)
        removed_B = jnp.where(live_B, removed_B + removed_mass(scaled_BV, logits_BV), removed_B)
    # 4. Run the model on the new tokens: slot `t` of the cache takes their keys and values.
    hidden_BLD, cache = model(
        ids_B[:, None],
        (rows.length_B + s.t)[:, None],
        VisibleKeys(rows.length_B, jnp.full_like(ids_B, s.t + 1)),
        s.cache,
        jnp.full_like(ids_B, s.t),
        _key_positions(rows, s.cache),
        layers=layers,
    )
    next_logits_BV = _stored(model.logits(hidden_BLD[:, 0]), rows.temperature_B)
    # 5. Write the tokens of live rows.
    return DecodeState(
        t=s.t + 1,
        cache=cache,
        logits_BV=rows_minor(next_logits_BV),
        done_B=done_B,
        ids_BT=s.ids_BT.at[:, s.t].set(jnp.where(live_B, ids_B, 0), mode="drop"),
        logps_BT=s.logps_BT.at[:, s.t].set(jnp.where(live_B, logps_B, 0.0), mode="drop"),
        count_B=count_B,
        stop_state_B=stop_state_B,
        grammar_state_B=grammar_state_B,
        removed_B=removed_B,
    )


def _stored(logits_BV: Array, temperature_B: Array) -> Array:
    """Returns the logits of a state: divided by the temperature, but on a GPU as they are.

    A TPU divides while it writes the product. A GPU cannot: it would read and write all logits once
    more, and divides them without traffic when they are read, see `_loaded`.
    """
    return logits_BV if target_platform() == "gpu" else scaled(logits_BV, temperature_B)


def _loaded(logits_BV: Array, temperature_B: Array) -> Array:
    """Returns the logits of a state divided by the temperature."""
    return scaled(logits_BV, temperature_B) if target_platform() == "gpu" else logits_BV


def rows_minor(logits_BV: Array) -> Array:
    """Stores logits with adjacent rows next to each other on a TPU: it then copies none of them."""
    return jax.lax.platform_dependent(
        logits_BV,
        tpu=lambda x: with_layout_constraint(x, Layout((1, 0))),
        default=lambda x: x,
    )


def _key_positions(rows: Prompts, cache: KVCache) -> Array:
    """Returns the positions, int32 `[B, P + slots]`, of the keys of prompts and own tokens."""
    assert cache.prefix is not None, "decode puts the cache of the prompts there"
    prompt, slots = (keys.shape[2] for keys in (cache.prefix.k[0], cache.k[0]))
    length_B1 = rows.length_B[:, None]
    prompt_BP = jnp.zeros_like(length_B1) + jnp.arange(prompt)[None]
    return jnp.concatenate([prompt_BP, length_B1 + jnp.arange(slots)[None]], axis=1)


def mask_logits(logits: Array, allowed_mask: Array) -> Array:
    """Returns the logits with minus infinity at tokens outside `allowed_mask`.

    The mask is bool, of equal rank; its last axis may be shorter, because a model's vocabulary is
    often padded beyond its tokenizer's. Padding is not allowed.
    """
    missing = logits.shape[-1] - allowed_mask.shape[-1]
    mask = jnp.pad(allowed_mask, [(0, 0)] * (allowed_mask.ndim - 1) + [(0, missing)])
    return jnp.where(mask, logits, -jnp.inf)


def padding_of(config: DecoderConfig) -> Array | None:
    """Returns the first id of the padding of a vocabulary, int32; None if it has no padding."""
    return None if config.num_tokens in (0, config.vocab_size) else jnp.int32(config.num_tokens)


def mask_padding(logits: Array, num_tokens: Array | None) -> Array:
    """Returns logits `[..., V]` with minus infinity from id `num_tokens` on, see `padding_of`."""
    if num_tokens is None:
        return logits
    place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(place < num_tokens, logits, -jnp.inf)


def scaled(logits_BV: Array, temperature_B: Array) -> Array:
    """Returns the logits divided by the temperature; a temperature of 0 counts as 1."""
    return logits_BV / jnp.where(temperature_B == 0, 1.0, temperature_B)[:, None]


def sample_token(
    logits_BV: Array, t: Array, temperature_B: Array, top_p_B: Array | None, keys_B: Array
) -> tuple[Array, Array]:
    """Samples one token per row.

    Args:
      logits_BV: float32 logits, divided by the temperature; minus infinity at tokens that are not
        allowed.
      t: int32 scalar or one per row, the position that is folded into the keys; the keys are not
        consumed.
      temperature_B: float32; 0 takes the likeliest token.
      top_p_B: float32 nucleus sizes; None, like 1, filters nothing.

    Returns:
      int32 ids, and float32 log-probabilities at the temperature (at 1 if it is 0), before the
      nucleus filter.
    """
    nucleus_BV = logits_BV if top_p_B is None else top_p_filter(logits_BV, top_p_B)
    keys_B = jax.vmap(jax.random.fold_in, (0, 0 if t.ndim else None))(keys_B, t)
    top_B = jnp.max(logits_BV, axis=-1)
    sample_B, total_B = gumbel_sample(nucleus_BV, top_B, keys_B)
    if top_p_B is not None:
        total_B = jnp.sum(jnp.exp(logits_BV - top_B[:, None]), axis=-1)
    ids_B = jnp.where(temperature_B == 0, _likeliest(logits_BV), sample_B).astype(jnp.int32)
    # `log_softmax` of one token per row, without storing it for all tokens.
    chosen_B = jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1)[:, 0]
    # All of it before the next logits are computed, which then take the place of these: without
    # the barrier XLA keeps a copy of the logits, because it might read them later.
    return jax.lax.optimization_barrier((ids_B, chosen_B - top_B - jnp.log(total_B)))


def _likeliest(logits_BV: Array) -> Array:
    """Returns the number of the largest logit of each row, the first one of equal ones."""

    def by_reductions(logits_BV: Array) -> Array:
        # XLA for CPUs vectorizes two reductions, but not `argmax`.
        is_top_BV = logits_BV == jnp.max(logits_BV, axis=-1, keepdims=True)
        place_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
        return jnp.min(jnp.where(is_top_BV, place_BV, logits_BV.shape[-1] - 1), axis=-1)

    return jax.lax.platform_dependent(
        logits_BV, cpu=by_reductions, default=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)
    )


def gumbel_sample(logits_BV: Array, top_B: Array, keys_B: Array) -> tuple[Array, Array]:
    """Samples one token per row by the Gumbel-max trick (Maddison et al. 2014).

      argmax(logits + g) ~ softmax(logits),   g ~ Gumbel(0, 1)

    In a large vocabulary the first sample is a block of tokens, by the sum of their probabilities,
    and the second a token of that block: a row needs `C + N` random numbers instead of `C N`.

    Args:
      logits_BV: float32; minus infinity excludes a token.
      top_B: float32, the largest logit of each row.

    Returns:
      int32 ids, and float32 `sum(exp(logits - top))`.
    """
    vocab = logits_BV.shape[1]
    if vocab <= FLAT_SAMPLING_LIMIT:
        noise_B = jax.vmap(lambda key: jax.random.gumbel(key, (vocab + 1,)))(keys_B)
        total_B = jnp.sum(jnp.exp(logits_BV - top_B[:, None]), axis=-1)
        return jnp.argmax(logits_BV + noise_B[:, :vocab], axis=-1), total_B
    logits_BNC = _in_blocks(logits_BV)
    _, blocks, size = logits_BNC.shape
    noise_B = jax.vmap(lambda key: jax.random.gumbel(key, (size + blocks,)))(keys_B)
    # 1. The block. Subtracting the row's maximum keeps the exponentials in range. Without the
    # barrier XLA would compute the total from all logits once more.
    weight_BN = jnp.sum(jnp.exp(logits_BNC - top_B[:, None, None]), axis=-1)
    weight_BN = jax.lax.optimization_barrier(weight_BN)
    block_B = jnp.argmax(jnp.log(weight_BN) + noise_B[:, size:], axis=-1)
    # 2. The token of this block.
    token_B = jnp.argmax(_block(logits_BNC, block_B) + noise_B[:, :size], axis=-1)
    return block_B * size + token_B, jnp.sum(weight_BN, axis=-1)


def _in_blocks(logits_BV: Array) -> Array:
    """Returns the logits `[B, N, C]` of N blocks of C tokens, as many blocks as divide them."""
    vocab = logits_BV.shape[1]
    counts = (n for n in (SAMPLING_BLOCKS >> i for i in range(4)) if vocab % (n * SUBLANES) == 0)
    if (blocks := next(counts, 0)) == 0:
        blocks = SAMPLING_BLOCKS
        missing = -vocab % (blocks * SUBLANES)
        logits_BV = jnp.pad(logits_BV, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits_BV.reshape(len(logits_BV), blocks, -1)


def _block(logits_BNC: Array, block_B: Array) -> Array:

    def gather(logits_BNC: Array, block_B: Array) -> Array:
        return jnp.take_along_axis(logits_BNC, block_B[:, None, None], axis=1)[:, 0]

    def mask(logits_BNC: Array, block_B: Array) -> Array:
        is_block_BN = jnp.arange(logits_BNC.shape[1])[None] == block_B[:, None]
        return jnp.max(jnp.where(is_block_BN[:, :, None], logits_BNC, -jnp.inf), axis=1)

    # To gather, a TPU would first copy all logits to another layout.
    return jax.lax.platform_dependent(logits_BNC, block_B, tpu=mask, default=gather)


def top_p_filter(scaled_BV: Array, top_p_B: Array, parts: int | None = None) -> Array:
    """Keeps the smallest set of likeliest tokens whose probability reaches `top_p`.

    Nothing is sorted. The lowest logit of the nucleus, the lowest with less than `top_p` above it,
    is found by a search over all float32 numbers. Source: Holtzman et al. 2020 (nucleus sampling).

    Args:
      scaled_BV: float32 logits, divided by the temperature.
      top_p_B: float32; a row whose `top_p` is 1 is returned unchanged.
      parts: how many parts each round of the search cuts the remaining range into. Default: 2 on a
        CPU, else 8, because a GPU and a TPU read the logits as long for seven sums as for one.

    Returns:
      The logits, with minus infinity outside the nucleus.
    """
    weight_BV = jax.nn.softmax(scaled_BV, axis=-1)
    rank_BV = _sortable_bits(scaled_BV)
    parts = parts or (2 if target_platform() == "cpu" else 8)

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        # The answer is in [low, high], both included. Each of the parts before it ends in a number
        # with a probability of at least `top_p` above it: count these parts.
        low_B, high_B = bounds
        step_B = (high_B - low_B) // jnp.uint32(parts) + jnp.uint32(1)
        parts_below_B = jnp.zeros_like(low_B)
        for i in range(1, parts):
            # The last of a part, or the highest logit, above which there is nothing.
            last_B = low_B + jnp.minimum(jnp.uint32(i) * step_B - jnp.uint32(1), high_B - low_B)
            above_B = jnp.sum(weight_BV, axis=-1, where=rank_BV > last_B[:, None])
            parts_below_B = parts_below_B + (above_B >= top_p_B).astype(jnp.uint32)
        low_B = low_B + parts_below_B * step_B
        return low_B, low_B + jnp.minimum(step_B - jnp.uint32(1), high_B - low_B)

    # A float32 has 32 bits and a round settles log2(parts) of them.
    rounds = math.ceil(32 / math.log2(parts))
    bounds = (jnp.zeros(scaled_BV.shape[0], jnp.uint32), jnp.max(rank_BV, axis=-1))
    lowest_B, _ = jax.lax.fori_loop(0, rounds, narrow, bounds)
    # Rows with `top_p` 1 are exempt: a rounded sum may reach 1 before the last tokens.
    in_nucleus_BV = (rank_BV >= lowest_B[:, None]) | (top_p_B >= 1)[:, None]
    return jnp.where(in_nucleus_BV, scaled_BV, -jnp.inf)


def _sortable_bits(x: Array) -> Array:
    """Maps float32 to uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    # Negative floats order in reverse of their bits; flipping all bits restores the order.
    return jnp.where(bits >= sign, ~bits, bits | sign)
