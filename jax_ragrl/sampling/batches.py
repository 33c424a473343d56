"""Decodes one batch of prompts in several programs, with a growing cache and a shrinking batch.

Attention reads every slot of the cache, and a row that is done costs as much as a live row.
Therefore a cache starts small and doubles when it is full, and when at most half of the prompts
have a live row, these continue in a smaller batch. The tokens equal those of one long program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding

from jax_ragrl.models.decoder import KVCache
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.sharding import (
    data_parallel_size,
    mesh_context,
    replicate,
    shard_batch,
    to_host,
)
from jax_ragrl.sampling.decode import (
    DecodeState,
    Grammar,
    Prompts,
    Samples,
    decode,
    start_decode,
)
from jax_ragrl.sampling.pages import ContextCache

# The numbers of some prompts of a batch, and the samples of their rows, on the host.
PartialSamples = tuple[np.ndarray, Samples]
Finish = Callable[[], list[PartialSamples]]


@dataclasses.dataclass
class SamplingCounters:
    """Work of a sampler so far, on all devices of a process.

    Fields:
      tokens: new tokens that belong to an action.
      row_steps: rows times decode steps; a row that is done, or that is padding, counts as well.
      prefill_tokens: tokens of prompts that were run, padding included.
      programs: calls of a compiled program that decodes or prefills.
    """

    tokens: int = 0
    row_steps: int = 0
    prefill_tokens: int = 0
    programs: int = 0


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts that is ready to be decoded by a split decoder on a mesh.

    Fields:
      prompts, ids_BL: the padded prompts and their int32 tokens that have to be run, on the host.
      length: the padded length of the prompts in tokens.
      grammar: the constraints of all rows, on the devices.
      slots: the sizes of the cache, ascending, in new tokens.
      sizes: the batch sizes that it may shrink to, in prompts per device.
      use_top_p, stride: as in `decode`.
      contexts: keeps the contexts of the batch; None: none are kept.
      tokens: with `contexts`, the int32 tokens of each prompt.
      matches: the pages of each prompt that `contexts` has; None: all tokens are run.
    """

    model: SplitModel
    prompts: Prompts
    ids_BL: np.ndarray
    length: int
    grammar: Grammar
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    use_top_p: bool
    stride: int
    mesh: Mesh | None
    counters: SamplingCounters = dataclasses.field(default_factory=SamplingCounters)
    contexts: ContextCache | None = None
    tokens: Sequence[np.ndarray] = ()
    matches: Sequence[Sequence[int]] | None = None

    @property
    def width(self) -> int:
        return int(self.prompts.seed_BW.shape[1])

    @property
    def is_one_program(self) -> bool:
        """Whether one program samples all tokens, so that the batch never grows or shrinks."""
        return len(self.slots) == 1

    def start(self) -> Finish:
        """Dispatches the first programs; the returned function runs the others and waits."""
        count, shards = len(self.prompts.length_B), data_parallel_size(self.mesh)
        # Rows of padding come last: dealt out in turn, every device gets its share of them.
        numbers = np.arange(count).reshape(-1, shards).T.ravel()
        host = jax.tree.map(lambda x: x[numbers], (self.prompts, self.ids_BL))
        prompts, ids_BL = shard_batch(host, self.mesh)
        self.counters.prefill_tokens += self.ids_BL.size
        self.counters.programs += 1
        size = f"{self.ids_BL.shape[0]} x {self.ids_BL.shape[1]}"
        kept, after = None, ""
        if self.contexts is not None and self.matches is not None:
            kept = self.contexts.prefix(self.matches, len(self.ids_BL), self.length)
            after = " after kept tokens"
        name = f"prefill {size}{after}, width {self.width} + {self.slots[0]}"
        with mesh_context(self.mesh), report_compiling(name):
            state, prefix = start_decode(self.model, prompts, ids_BL, kept, slots=self.slots[0])
        state = self._decode(prompts, state, prefix)
        if self.is_one_program and self.contexts is None:
            # The caches can be freed when the program has ended.
            prefix = prefix._replace(k=(), v=())
            state = state._replace(cache=prefix)
        # Passed in a list that the callee empties, so that it alone owns the buffers and can free
        # them before the end.
        return functools.partial(self._finish, numbers, [(prompts, state, prefix)])

    def _finish(
        self, numbers: np.ndarray, arrays: list[tuple[Prompts, DecodeState, KVCache]]
    ) -> list[PartialSamples]:
        (prompts, state, prefix), parts, last = arrays.pop(), list[PartialSamples](), 0
        while True:
            # 1. Wait for the program, then stop if the cache has its full size or no row is live.
            t, done_B = to_host((state.t, state.done_B))
            self.counters.row_steps += len(done_B) * int(t - last)
            self.counters.programs += 1
            last = t
            live_WN = ~done_B.reshape(data_parallel_size(self.mesh), -1, self.width).all(axis=-1)
            is_last = t >= self.slots[-1] or not live_WN.any()
            # 2. Shrink the batch to a size that holds the live prompts of every device: these come
            # first, then prompts that are done.
            size = 0 if is_last else self._smallest_size(live_WN)
            keep_WN = np.argsort(~live_WN, axis=1, kind="stable")[:, :size].astype(np.int32)
            if size < live_WN.shape[1]:
                samples = to_host(state.samples())
                parts.append((numbers, samples))
                if self.contexts is not None:
                    leaving = np.setdiff1d(np.arange(len(numbers)), keep_WN.ravel()).tolist()
                    real = [b for b in leaving if numbers[b] < len(self.tokens)]
                    self.contexts.keep(
                        {b: self.tokens[numbers[b]] for b in real},
                        samples.ids_BT,
                        samples.count_B,
                        prompts.length_B,
                        prefix,
                        state.cache,
                    )
                if is_last:
                    return parts
                numbers = np.take_along_axis(numbers.reshape(live_WN.shape), keep_WN, 1).ravel()
                keep = {"keep_WN": replicate(keep_WN, self.mesh), "count": live_WN.shape[1]}
                with mesh_context(self.mesh):
                    prompts, state, prefix = resize_all((prompts, state, prefix), **keep)
            # 3. Grow a cache that is full, and continue.
            if t >= state.ids_BT.shape[1]:
                grow = {name: getattr(state, name) for name in ("cache", "ids_BT", "logps_BT")}
                with mesh_context(self.mesh):
                    grown = resize_all(grow, slots=next(n for n in self.slots if n > t))
                state = state._replace(**grown)
            state = self._decode(prompts, state, prefix)

    def _decode(self, prompts: Prompts, state: DecodeState, prefix: KVCache) -> DecodeState:
        count, slots = len(prompts.length_B), state.ids_BT.shape[1]
        size = count // data_parallel_size(self.mesh)
        kind = self.grammar.describe(use_top_p=self.use_top_p)
        shape = f"{count} x {prefix.k[0].shape[2]} + {slots}, width {self.width}"
        with mesh_context(self.mesh), report_compiling(f"sampler {shape}{kind}"):
            return decode(
                self.model,
                prompts,
                self.grammar,
                self._shrink_at(size),
                state,
                prefix,
                use_top_p=self.use_top_p,
                stride=self.stride,
            )

    def _smallest_size(self, live_WN: np.ndarray) -> int:
        """Returns the smallest batch size, in prompts per device, that holds all live prompts.

        The current size unless one of at most half of it does: a smaller step would not repay its
        copy.
        """
        live, count = live_WN.sum(axis=1).max(), live_WN.shape[1]
        return min((n for n in self.sizes if live <= n <= count // 2), default=count)

    def _shrink_at(self, count: int) -> Array:
        """Returns the number of live prompts per device, int32 `[W]`, at which a batch shrinks.

        0 for a batch that is too small to shrink: it ends when no row is live.
        """
        size = max((n for n in self.sizes if n <= count // 2), default=0)
        size = 0 if self.is_one_program else size
        size_W: Array = replicate(np.full(data_parallel_size(self.mesh), size, np.int32), self.mesh)
        return size_W


def resize_all(tree: Any, **options: Any) -> Any:
    """Returns `resize` of all arrays of a tree, which are freed one at a time."""

    def replace(x: Array) -> Array:
        if not x.ndim:
            return x
        new = resize(x, x.sharding, **options)
        x.delete()  # takes effect after the device has read it
        return new

    return jax.tree.map(replace, tree)


@in_order
@functools.partial(jax.jit, static_argnames=("layout", "count", "slots"))
def resize(
    x: Array, layout: Sharding, keep_WN: Array | None = None, count: int = 0, slots: int = 0
) -> Array:
    """Returns some prompts of an array, or all of them with more slots.

    Args:
      x: its first axis is `W * count` prompts, or the rows of these in order.
      layout: its sharding, and that of the result.
      keep_WN: int32 numbers, below `count`, of the prompts to keep on each of W devices, so that no
        row moves to another device; None keeps all.
      count: prompts per device.
      slots: the new size of the axis of slots; 0: as it is.
    """
    if keep_WN is not None:
        shards = x.reshape(keep_WN.shape[0], count, -1, *x.shape[1:])
        rows = jax.vmap(lambda shard, keep_N: shard[keep_N])(shards, keep_WN)
        x = rows.reshape(-1, *x.shape[1:])
    if slots:
        axis = x.ndim // 2  # [rows, slots], or a cache [rows, heads, slots, width]
        widths = [(0, slots - size if i == axis else 0) for i, size in enumerate(x.shape)]
        x = jnp.pad(x, widths)
    is_split = isinstance(layout, NamedSharding)
    return jax.lax.with_sharding_constraint(x, layout) if is_split else x
