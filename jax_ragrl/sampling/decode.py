"""The jitted sampler: prefill once a prompt, fork, decode many steps without a host sync.

A batch of few tokens is one program, `generate`. A longer one is begun, and goes on with a cache of
more slots, or with fewer prompts (`sampling/batches.py` says when). A sampled token depends on its
own prompt, its own key and its own position alone: keys are folded from (seed of the state,
sibling, position), so a question sampled alone or among others gets the same tokens.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_ragrl.models.decoder import KVCache, init_cache
from jax_ragrl.runtime.sharding import constrain
from jax_ragrl.types import Tensor

# Tokens between two looks at whether rows have ended. A look is free on a CPU and a TPU; on a GPU
# the host waits for it.
STRIDE = 16
# A vocabulary of more tokens than FEW is drawn from in so many blocks.
FEW, BLOCKS = 4096, 128


class Prompts(NamedTuple):
    """A padded batch of prompts and how each is sampled.

    Fields: int32 `ids_BP` right-padded, int32 `length_B`, uint32 `seed_B`, float32 `temperature_B`
    (0: greedy) and `top_p_B`, int32 `limit_B` new tokens at most.
    """

    ids_BP: Tensor
    length_B: Tensor
    seed_B: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    limit_B: Tensor


class Sampled(NamedTuple):
    """New tokens of `B * width` rows, siblings adjacent: int32 ids, float32 log-probabilities at
    the sampling temperature, and int32 counts. The stop token, where one came, is counted.
    """

    ids_BT: Array
    logps_BT: Array
    count_B: Array


class Loop(NamedTuple):
    """Rows of which `t` tokens are written, or fewer where one is done. Outside of a program its
    cache is without the prefix, which stays as it is."""

    t: Array
    cache: KVCache
    logits_BV: Array
    done_B: Array
    ids_BT: Array
    logps_BT: Array
    count_B: Array
    state_B: Array

    def sampled(self) -> Sampled:
        """What is written so far."""
        return Sampled(self.ids_BT, self.logps_BT, self.count_B)


class Grammar(NamedTuple):
    """What may be written, and what ends a row.

    Fields: int32 `stop_ids_S`, an argument so that a new one takes effect; bool `allowed_V`, the
    only tokens that may be written (a grammar), None: all; `stop_SV` of strings that end a row too,
    see `text.stops.stop_table`, None: there are none.
    """

    stop_ids_S: Tensor
    allowed_V: Tensor | None = None
    stop_SV: Tensor | None = None


@functools.partial(jax.jit, static_argnames=("graph", "width", "steps", "nucleus", "stride"))
def generate(
    graph: Any,
    params: Any,
    prompts: Prompts,
    grammar: Grammar,
    *,
    width: int,
    steps: int,
    nucleus: bool = True,
    stride: int = 1,
) -> Sampled:
    """Samples `width` continuations of every prompt, `steps` tokens at most.

    Args:
      graph, params: a split decoder; `graph` is static.
      prompts: the batch; rows of length 0 are padding and return no tokens.
      grammar: for all rows alike.
      width: siblings a prompt; their prompt is prefilled once.
      steps: the most new tokens of any row; the loop ends when every row has ended.
      nucleus: whether some row has a `top_p` below 1: where none has, nothing is truncated.
      stride: tokens between two looks at whether every row has ended. It changes no result.
    """
    model = nnx.merge(graph, params)
    loop = _forked(model, prompts, width, steps)
    return _decoded(model, prompts, grammar, loop, None, nucleus, stride).sampled()


@functools.partial(jax.jit, static_argnames=("graph", "width", "slots", "nucleus", "stride"))
def begin(
    graph: Any,
    params: Any,
    prompts: Prompts,
    grammar: Grammar,
    few_W: Array,
    *,
    width: int,
    slots: int,
    nucleus: bool = True,
    stride: int = 1,
) -> tuple[Loop, KVCache]:
    """The first `slots` tokens as `generate` samples them, and the cache of the prompts.

    It ends early when of each of the W equal parts of the batch, one on a device, no more than
    `few_W` prompts have a row that goes on. `stride` has to divide `slots`.
    """
    model = nnx.merge(graph, params)
    loop = _forked(model, prompts, width, slots)
    prefix = loop.cache.prefix
    assert prefix is not None, "the prompts' own"
    return _pinned(_decoded(model, prompts, grammar, loop, few_W, nucleus, stride), prefix)


@functools.partial(
    jax.jit, static_argnames=("graph", "nucleus", "stride"), donate_argnames=("loop",)
)
def go_on(
    graph: Any,
    params: Any,
    prompts: Prompts,
    grammar: Grammar,
    few_W: Array,
    loop: Loop,
    prefix: KVCache,
    *,
    nucleus: bool = True,
    stride: int = 1,
) -> Loop:
    """More tokens of rows that were begun, until their cache is full, or early as in `begin`."""
    loop = loop._replace(cache=loop.cache._replace(prefix=prefix))
    model = nnx.merge(graph, params)
    return _pinned(_decoded(model, prompts, grammar, loop, few_W, nucleus, stride), prefix)[0]


def _forked(model: Any, prompts: Prompts, width: int, slots: int) -> Loop:
    """Rows that have written nothing yet."""
    prefix, logits_BV = _prefill(model, prompts)
    batch = prompts.length_B.shape[0] * width
    return Loop(
        t=jnp.int32(0),
        cache=init_cache(model.config, batch, slots, prefix),
        logits_BV=jnp.repeat(logits_BV, width, axis=0),
        done_B=jnp.repeat(prompts.length_B, width) == 0,
        ids_BT=jnp.zeros((batch, slots), jnp.int32),
        logps_BT=jnp.zeros((batch, slots), jnp.float32),
        count_B=jnp.zeros(batch, jnp.int32),
        state_B=jnp.zeros(batch, jnp.uint8),
    )


def _decoded(
    model: Any,
    prompts: Prompts,
    grammar: Grammar,
    loop: Loop,
    few_W: Array | None,
    nucleus: bool,
    stride: int,
) -> Loop:
    """Rows as they are when their cache is full, or few enough go on."""
    slots, count = loop.ids_BT.shape[1], prompts.length_B.shape[0]
    width = loop.done_B.shape[0] // count
    rows = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), prompts)
    sibling_B = jnp.tile(jnp.arange(width), count)
    keys_B = jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(
        rows.seed_B, sibling_B
    )
    # XLA for GPUs makes one product of several narrow ones, and would join weights every token.
    layers = model.layers_apart(join=jax.default_backend() == "gpu")
    step = functools.partial(_decode, model, layers, rows, keys_B, grammar, nucleus)

    def unfinished(s: Loop) -> Array:
        if few_W is None:
            return ~jnp.all(s.done_B)
        live_WN = jnp.any(~s.done_B.reshape(few_W.shape[0], -1, width), axis=-1)
        return jnp.any(jnp.sum(live_WN, axis=-1) > few_W)

    def several(s: Loop) -> Loop:
        return jax.lax.fori_loop(0, stride, lambda _, s: step(s), s)

    return jax.lax.while_loop(lambda s: (s.t < slots) & unfinished(s), several, loop)


def _pinned(loop: Loop, prefix: KVCache) -> tuple[Loop, KVCache]:
    """Both in one layout, whichever program made them: the next one is then compiled once."""
    names = {0: (), 1: ("batch",), 2: ("batch", None), 4: ("batch", "kv", None, None)}
    loop = loop._replace(cache=loop.cache._replace(prefix=None))
    logits_BV = constrain(loop.logits_BV, ("batch", "vocab"))
    loop, prefix = jax.tree.map(lambda x: constrain(x, names[x.ndim]), (loop, prefix))
    return loop._replace(logits_BV=logits_BV), prefix


def _prefill(model: Any, prompts: Prompts) -> tuple[KVCache, Array]:
    """The cache of every prompt and the logits after its last token.

    Padding comes last, so that a causal forward needs no mask.
    """
    positions_BP = jnp.broadcast_to(jnp.arange(prompts.ids_BP.shape[1])[None], prompts.ids_BP.shape)
    hidden_BPD, cache = model(prompts.ids_BP, positions_BP, None, keep=True)
    last_B = jnp.maximum(prompts.length_B - 1, 0)
    last_BD = jnp.take_along_axis(hidden_BPD, last_B[:, None, None], axis=1)[:, 0]
    return cache, model.logits(last_BD)


def _decode(
    model: Any,
    layers: Any,
    rows: Prompts,
    keys_B: Array,
    grammar: Grammar,
    nucleus: bool,
    s: Loop,
) -> Loop:
    """Samples token `t` of every row and reads the logits after it.

    Rows that are done write nothing, and past the last step none does.
    """
    stop_ids_S, allowed_V, stop_SV = grammar
    logits_BV = s.logits_BV if allowed_V is None else only(s.logits_BV, allowed_V[None])
    top_p_B = rows.top_p_B if nucleus else None
    ids_B, logps_B = choose(logits_BV, s.t, rows.temperature_B, top_p_B, keys_B)
    live_B = ~s.done_B & (s.t < s.ids_BT.shape[1])
    count_B = s.count_B + live_B.astype(jnp.int32)
    stopped_B, state_B = jnp.any(ids_B[:, None] == stop_ids_S[None], axis=1), s.state_B
    if stop_SV is not None:
        state_B = stop_SV[state_B, jnp.minimum(ids_B, stop_SV.shape[1] - 1)]
        stopped_B = stopped_B | (state_B == stop_SV.shape[0] - 1)
    seen_BS, positions_BS = _keys(rows, s.t, s.ids_BT.shape[1])
    hidden_BLD, cache = model(
        ids_B[:, None],
        (rows.length_B + s.t)[:, None],
        seen_BS[:, None],
        s.cache,
        jnp.full_like(ids_B, s.t),
        positions_BS,
        layers=layers,
    )
    return Loop(
        t=s.t + 1,
        cache=cache,
        logits_BV=model.logits(hidden_BLD[:, 0]),
        done_B=s.done_B | stopped_B | (count_B >= rows.limit_B),
        ids_BT=s.ids_BT.at[:, s.t].set(jnp.where(live_B, ids_B, 0), mode="drop"),
        logps_BT=s.logps_BT.at[:, s.t].set(jnp.where(live_B, logps_B, 0.0), mode="drop"),
        count_B=count_B,
        state_B=state_B,
    )


def _keys(rows: Prompts, t: Array, steps: int) -> tuple[Array, Array]:
    """Which keys token `t` sees, and their positions: its prompt's, without the padding, and those
    of what its row wrote so far."""
    length_B1, before_BP = rows.length_B[:, None], jnp.zeros_like(rows.ids_BP)
    before_BP = before_BP + jnp.arange(before_BP.shape[1])[None]
    wrote_BT = jnp.zeros_like(length_B1) + jnp.arange(steps)[None]
    seen_BS = jnp.concatenate([before_BP < length_B1, wrote_BT <= t], axis=1)
    return seen_BS, jnp.concatenate([before_BP, length_B1 + wrote_BT], axis=1)


def only(logits: Array, allowed: Array) -> Array:
    """Logits with what a grammar forbids at minus infinity.

    `allowed` is bool of equal rank and may be shorter at its end: a model's vocabulary is often
    padded beyond its tokenizer's.
    """
    missing = logits.shape[-1] - allowed.shape[-1]
    allowed = jnp.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, missing)])
    return jnp.where(allowed, logits, -jnp.inf)


def choose(
    logits_BV: Array, t: Array, temperature_B: Array, top_p_B: Array | None, keys_B: Array
) -> tuple[Array, Array]:
    """One token a row, and its log-probability before any truncation.

    Without `top_p_B` nothing is truncated, as nothing is in a row where it is 1. Temperature 0
    takes the likeliest token and reports its log-probability at temperature 1. Keys are not
    consumed: the position `t` is folded in.
    """
    greedy_B1 = (temperature_B == 0)[:, None]
    scaled_BV = logits_BV / jnp.where(greedy_B1, 1.0, temperature_B[:, None])
    nucleus_BV = scaled_BV if top_p_B is None else truncated(scaled_BV, top_p_B)
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, t)
    drawn_B = drawn(nucleus_BV, keys_B)
    ids_B = jnp.where(greedy_B1[:, 0], jnp.argmax(scaled_BV, axis=-1), drawn_B)
    logps_BV = jax.nn.log_softmax(scaled_BV, axis=-1)
    return ids_B.astype(jnp.int32), jnp.take_along_axis(logps_BV, ids_B[:, None], axis=1)[:, 0]


def drawn(logits_BV: Array, keys_B: Array) -> Array:
    """One token a row, as often as it is likely, by the Gumbel-max trick (Maddison et al. 2014).

    Of a large vocabulary a block is drawn first and then a token in it, which spares random numbers
    for some 150,000 tokens a row.
    """
    rows, vocab = logits_BV.shape
    blocks = 1 if vocab <= FEW else BLOCKS
    padded_BV = jnp.pad(logits_BV, ((0, 0), (0, -vocab % blocks)), constant_values=-jnp.inf)
    logits_BNC = padded_BV.reshape(rows, blocks, -1)
    size = logits_BNC.shape[2]
    noise_B = jax.vmap(lambda key: jax.random.gumbel(key, (size + blocks,)))(keys_B)
    token_BC, block_BN = noise_B[:, :size], noise_B[:, size:]
    if blocks == 1:
        return jnp.argmax(logits_BV + token_BC, axis=-1)
    weight_BNC = jnp.exp(logits_BNC - jnp.max(logits_BV, axis=-1)[:, None, None])
    block_B = jnp.argmax(jnp.log(jnp.sum(weight_BNC, axis=-1)) + block_BN, axis=-1)
    logits_BC = jnp.take_along_axis(logits_BNC, block_B[:, None, None], axis=1)[:, 0]
    return block_B * size + jnp.argmax(logits_BC + token_BC, axis=-1)


def truncated(scaled_BV: Array, top_p_B: Array, parts: int | None = None) -> Array:
    """Keeps the smallest set of tokens whose probability reaches `top_p` (Holtzman et al. 2020).

    What is left out is minus infinity. A row whose `top_p` is 1 stays as it is. Nothing is sorted:
    the lowest logit that is kept, with less than `top_p` above it, is searched for among all
    float32 numbers, in so many `parts` of what is left of them at a time. By default 8, for a GPU
    and a TPU read the logits as long for seven sums as for one; 2 on a CPU.
    """
    weight_BV = jax.nn.softmax(scaled_BV, axis=-1)
    rank_BV = _rank(scaled_BV)
    parts = parts or (2 if jax.default_backend() == "cpu" else 8)

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_B, high_B = bounds
        step_B = (high_B - low_B) // jnp.uint32(parts) + jnp.uint32(1)
        passed_B = jnp.zeros_like(low_B)
        for i in range(1, parts):
            # The last of a part, or the highest logit, above which there is nothing.
            last_B = low_B + jnp.minimum(jnp.uint32(i) * step_B - jnp.uint32(1), high_B - low_B)
            above_B = jnp.sum(weight_BV, axis=-1, where=rank_BV > last_B[:, None])
            passed_B = passed_B + (above_B >= top_p_B).astype(jnp.uint32)
        low_B = low_B + passed_B * step_B
        return low_B, low_B + jnp.minimum(step_B - jnp.uint32(1), high_B - low_B)

    rounds = math.ceil(32 / math.log2(parts))
    bounds = (jnp.zeros(scaled_BV.shape[0], jnp.uint32), jnp.max(rank_BV, axis=-1))
    lowest_B, _ = jax.lax.fori_loop(0, rounds, narrow, bounds)
    # The sum is rounded: before the last tokens it may already be 1.
    kept_BV = (rank_BV >= lowest_B[:, None]) | (top_p_B >= 1)[:, None]
    return jnp.where(kept_BV, scaled_BV, -jnp.inf)


def _rank(x: Array) -> Array:
    """float32 as uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
