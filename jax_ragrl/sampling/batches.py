"""Decodes one batch of prompts in several programs, with a growing cache and a shrinking batch.

Attention reads every slot of the cache, and a row that is done costs as much as a live row.
Therefore a cache starts small and doubles when it is full, and when at most half of the prompts
have a live row, these continue in a smaller batch.

Invariant: the tokens equal the tokens of one long program, because a token depends on its prompt,
key and position alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding

from jax_ragrl.models.decoder import KVCache
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.compile_ahead import Program
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.sharding import (
    data_parallel_size,
    mesh_context,
    replicate,
    shard_batch,
    to_host,
)
from jax_ragrl.sampling.counters import SamplingCounters
from jax_ragrl.sampling.decode import (
    CHECK_STRIDE,
    DecodeState,
    Grammar,
    Prompts,
    Samples,
    continue_decode,
    generate,
    start_decode,
)

# The numbers of some prompts of a batch, and the samples of their rows, on the host.
PartialSamples = tuple[np.ndarray, Samples]
Finish = Callable[[], list[PartialSamples]]


def cache_sizes(max_new_tokens: int, initial: int) -> tuple[int, ...]:
    """Returns the sizes of a growing cache in slots: about `initial`, doubling, `max_new_tokens`.

    All are rounded up to multiples of `CHECK_STRIDE`: a program that checks its rows at this
    interval never runs past the end of its cache, and the kernel of a GPU can divide the cache into
    blocks of keys (`prefix_attention.KEY_BLOCKS`).
    """
    sizes = [max(1, _whole_strides(initial))]
    while CHECK_STRIDE * sizes[-1] < max_new_tokens:
        sizes.append(2 * sizes[-1])
    sizes[-1] = _whole_strides(max_new_tokens)
    return tuple(CHECK_STRIDE * n for n in sizes)


def _whole_strides(tokens: int) -> int:
    return -(-tokens // CHECK_STRIDE)


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts that is ready to be decoded.

    Fields:
      model: a split decoder, on the devices.
      prompts: the padded prompts, on the host.
      grammar: the constraints of all rows, on the devices.
      slots: the sizes of the cache, ascending, in new tokens.
      sizes: the batch sizes that it may shrink to, in prompts per device.
      use_top_p, stride: as in `generate`.
      mesh: the mesh of the model; None without one.
      counters: counts the work.
    """

    model: SplitModel
    prompts: Prompts
    grammar: Grammar
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    use_top_p: bool
    stride: int
    mesh: Mesh | None
    counters: SamplingCounters = dataclasses.field(default_factory=SamplingCounters)

    @property
    def width(self) -> int:
        """Rows per prompt, padding included."""
        return int(self.prompts.seed_BW.shape[1])

    @property
    def is_one_program(self) -> bool:
        """Whether one program samples all tokens and leaves only these on the devices."""
        return len(self.slots) == 1

    def start(self) -> Finish:
        """Dispatches the first program; the returned function runs the others and waits for all."""
        count, shards = len(self.prompts.length_B), data_parallel_size(self.mesh)
        options = {"use_top_p": self.use_top_p, "stride": self.stride}
        self.counters.add_prefill(count, self.prompts.ids_BP.shape[1])
        if self.is_one_program:
            prompts = shard_batch(self.prompts, self.mesh)
            with mesh_context(self.mesh), report_compiling(self._program(count, self.slots[0])):
                samples = generate(
                    self.model, prompts, self.grammar, max_new_tokens=self.slots[0], **options
                )
            return lambda: [(np.arange(count), self._count_all(to_host(samples)))]
        # Rows of padding come last: dealt out in turn, every device gets its share of them.
        numbers = np.arange(count).reshape(-1, shards).T.ravel()
        prompts = shard_batch(jax.tree.map(lambda x: x[numbers], self.prompts), self.mesh)
        shrink_at_W = self._shrink_at(count // shards)
        with mesh_context(self.mesh), report_compiling(self._program(count, self.slots[0])):
            state, prefix = start_decode(
                self.model, prompts, self.grammar, shrink_at_W, slots=self.slots[0], **options
            )
        # Passed in a list that the callee empties, so that it alone owns the buffers and can free
        # them before the end.
        return functools.partial(self._finish, numbers, [(prompts, state, prefix)])

    def programs(self) -> list[Program]:
        """Returns the programs of the batch; those that continue it follow the first one.

        The continuing programs of a smaller batch are listed by that batch.
        """
        count, slots = len(self.prompts.length_B), self.slots[0]
        prompts = shard_batch(self.prompts, self.mesh)
        args: tuple[Any, ...] = (self.model, prompts, self.grammar)
        options: dict[str, Any] = {"use_top_p": self.use_top_p, "stride": self.stride}
        name = self._program(count, slots)
        if self.is_one_program:
            options |= {"max_new_tokens": slots}
            return [Program(name, generate, args, options, self.mesh)]
        args = (*args, self._shrink_at(count // data_parallel_size(self.mesh)))
        options |= {"slots": slots}
        return [Program(name, start_decode, args, options, self.mesh, self._compile_next)]

    def _compile_next(self, results: tuple[DecodeState, KVCache]) -> None:
        """Compiles the programs that continue this batch, given what the first one returns."""
        state, prefix = results
        prompts = shard_batch(self.prompts, self.mesh)
        count = len(self.prompts.length_B) // data_parallel_size(self.mesh)
        shrink_at_W = self._shrink_at(count)
        args = (self.model, prompts, self.grammar, shrink_at_W)
        options: dict[str, Any] = {"use_top_p": self.use_top_p, "stride": self.stride}
        for slots in self.slots:
            larger_state = _with_slots(state, slots)
            # With the first size only a batch continues that was larger before.
            if slots > self.slots[0] or count < max(self.sizes):
                continue_decode.lower(*args, larger_state, prefix, **options).compile()
            self._compile_changes(prompts, larger_state, prefix, count)

    def _compile_changes(
        self, prompts: Prompts, state: DecodeState, prefix: KVCache, count: int
    ) -> None:
        """Compiles the copies to smaller batches and to a larger cache."""
        smaller = [n for n in self.sizes if n <= count // 2]
        slots = state.ids_BT.shape[1]
        larger = [n for n in self.slots if n > slots][:1]
        # An uncommitted array has the sharding of all arrays without a mesh.
        default = prompts.ids_BP.sharding
        for x in jax.tree.leaves((prompts, state, prefix)):
            for size in smaller if x.ndim else ():
                keep_WN = np.zeros((data_parallel_size(self.mesh), size), np.int32)
                keep_WN = replicate(keep_WN, self.mesh)
                _take.lower(x, keep_WN, count, x.sharding or default).compile()
        for x in jax.tree.leaves((state.cache, state.ids_BT, state.logps_BT)):
            for size in larger:
                _grow.lower(x, size, x.sharding or default).compile()

    def _count_all(self, samples: Samples) -> Samples:
        """Counts the decode steps of one program, as many as its longest row has."""
        steps = -(-int(samples.count_B.max()) // self.stride) * self.stride
        self.counters.add_decode(len(samples.count_B), steps)
        return samples

    def _finish(
        self, numbers: np.ndarray, arrays: list[tuple[Prompts, DecodeState, KVCache]]
    ) -> list[PartialSamples]:
        (prompts, state, prefix), parts, last = arrays.pop(), list[PartialSamples](), 0
        while True:
            # 1. Wait for the program, then stop if the cache has its full size or no row is live.
            t, done_B = to_host((state.t, state.done_B))
            self.counters.add_decode(len(done_B), t - last)
            last = t
            live_WN = ~done_B.reshape(data_parallel_size(self.mesh), -1, self.width).all(axis=-1)
            if t >= self.slots[-1] or not live_WN.any():
                return [*parts, (numbers, to_host(state.samples()))]
            # 2. Shrink the batch to a size that holds the live prompts of every device.
            size = self._smallest_size(live_WN)
            if size < live_WN.shape[1]:
                # Live prompts first, then prompts that are done, up to the new size.
                keep_WN = np.argsort(~live_WN, axis=1, kind="stable")[:, :size].astype(np.int32)
                parts.append((numbers, to_host(state.samples())))
                numbers = np.take_along_axis(numbers.reshape(live_WN.shape), keep_WN, 1).ravel()
                keep = replicate(keep_WN, self.mesh), live_WN.shape[1]
                with mesh_context(self.mesh):
                    prompts, state, prefix = take_prompts((prompts, state, prefix), *keep)
            # 3. Grow a cache that is full.
            if t >= state.ids_BT.shape[1]:
                with mesh_context(self.mesh):
                    state = grow_cache(state, next(n for n in self.slots if n > t))
            # 4. Continue.
            state = self._continue(prompts, state, prefix, size)

    def _continue(
        self, prompts: Prompts, state: DecodeState, prefix: KVCache, size: int
    ) -> DecodeState:
        name = self._program(len(prompts.length_B), state.ids_BT.shape[1])
        with mesh_context(self.mesh), report_compiling(f"{name}, continued"):
            return continue_decode(
                self.model,
                prompts,
                self.grammar,
                self._shrink_at(size),
                state,
                prefix,
                use_top_p=self.use_top_p,
                stride=self.stride,
            )

    def _program(self, count: int, slots: int) -> str:
        """Describes a program: prompts x length + new tokens, rows per prompt, and its kind."""
        shape = f"{count} x {self.prompts.ids_BP.shape[1]} + {slots}, width {self.width}"
        return f"sampler {shape}{self.grammar.describe(use_top_p=self.use_top_p)}"

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
        size_W: Array = replicate(np.full(data_parallel_size(self.mesh), size, np.int32), self.mesh)
        return size_W


def _with_slots(state: DecodeState, slots: int) -> DecodeState:
    """Returns an abstract state whose cache has another number of slots."""

    def with_axis(x: Any) -> Any:
        axis = x.ndim // 2  # as in `_grow`
        shape = (*x.shape[:axis], slots, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    arrays = {name: getattr(state, name) for name in ("cache", "ids_BT", "logps_BT")}
    return state._replace(**jax.tree.map(with_axis, arrays))


def take_prompts(tree: Any, keep_WN: Array, count: int) -> Any:
    """Gathers some prompts, or their rows, on each device; no row moves to another device.

    The inputs are freed one array at a time, so the memory in use grows by one array at most.

    Args:
      tree: arrays whose first axis is `W * count` prompts, or the rows of these in order.
      keep_WN: int32 numbers, below `count`, of the prompts to keep on each of W devices.
      count: prompts per device.

    Returns:
      The tree with `N` prompts per device; the input arrays are deleted.
    """
    return _replace_each(lambda x: _take(x, keep_WN, count, x.sharding), tree)


def grow_cache(state: DecodeState, slots: int) -> DecodeState:
    """Returns the state with room for `slots` tokens; input arrays are freed one at a time."""
    grow = {name: getattr(state, name) for name in ("cache", "ids_BT", "logps_BT")}
    return state._replace(**grow_slots(grow, slots))


def grow_slots(tree: Any, slots: int) -> Any:
    """Returns arrays with more slots (axis 1, or 2 of a cache); inputs are freed one at a time."""
    return _replace_each(lambda x: _grow(x, slots, x.sharding), tree)


def _replace_each(change: Callable[[Array], Array], tree: Any) -> Any:
    def replace(x: Array) -> Array:
        if not x.ndim:
            return x
        new = change(x)
        x.delete()  # takes effect after the device has read it
        return new

    return jax.tree.map(replace, tree)


@in_order
@functools.partial(jax.jit, static_argnames=("count", "layout"))
def _take(x: Array, keep_WN: Array, count: int, layout: Sharding) -> Array:
    shards = x.reshape(keep_WN.shape[0], count, -1, *x.shape[1:])
    rows = jax.vmap(lambda shard, keep_N: shard[keep_N])(shards, keep_WN)
    return _constrain(rows.reshape(-1, *x.shape[1:]), layout)


@in_order
@functools.partial(jax.jit, static_argnames=("slots", "layout"))
def _grow(x: Array, slots: int, layout: Sharding) -> Array:
    axis = x.ndim // 2  # [rows, slots], or a cache [rows, heads, slots, width]
    widths = [(0, slots - size if i == axis else 0) for i, size in enumerate(x.shape)]
    return _constrain(jnp.pad(x, widths), layout)


def _constrain(x: Array, layout: Sharding) -> Array:
    return jax.lax.with_sharding_constraint(x, layout) if isinstance(layout, NamedSharding) else x
