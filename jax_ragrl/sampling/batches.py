"""A batch of prompts from its first token to the end of its last row.

Attention reads every slot of a cache, and a row that is done costs what others do. So a cache
begins small and doubles, and where few enough prompts have a row that goes on, these go on in a
smaller batch. Tokens are those of one long program: they depend on prompt, key and position alone.
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
from jax_ragrl.runtime.sharding import fetch, on, place, share, ways
from jax_ragrl.sampling.decode import (
    STRIDE,
    Grammar,
    Loop,
    Prompts,
    Sampled,
    begin,
    generate,
    go_on,
)

Part = tuple[np.ndarray, Sampled]  # numbers of prompts, and what their rows hold, on the host
Finish = Callable[[], list[Part]]


def segments(steps: int, first: int) -> tuple[int, ...]:
    """The sizes of a cache of at most `steps` slots: about `first`, and twice the one before."""
    # A program may look at its rows this seldom, and none ends between.
    sizes = [max(1, -(-first // STRIDE)) * STRIDE]
    while sizes[-1] < steps:
        sizes.append(2 * sizes[-1])
    return (*sizes[:-1], steps)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch that may be begun: a split decoder, prompts on the host, and grammar on its devices.

    `slots` are the sizes of its cache, `sizes` those that it may shrink to, in prompts of a device.
    """

    net: tuple[Any, Any]
    prompts: Prompts
    grammar: Grammar
    width: int
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    nucleus: bool
    stride: int
    mesh: Mesh | None

    @property
    def one(self) -> bool:
        """Whether one program samples all of it, and leaves nothing on the devices but tokens."""
        return len(self.slots) == 1

    def begin(self) -> Finish:
        """Starts the first program. What is returned starts the others, and waits before each."""
        count, apart = len(self.prompts.length_B), ways(self.mesh)
        fixed = {"width": self.width, "nucleus": self.nucleus, "stride": self.stride}
        if self.one:
            prompts = place(self.prompts, self.mesh)
            with on(self.mesh):
                sampled = generate(*self.net, prompts, self.grammar, steps=self.slots[0], **fixed)
            return lambda: [(np.arange(count), fetch(sampled))]
        # Padding comes last: each device gets its share of it.
        numbers = np.arange(count).reshape(-1, apart).T.ravel()
        prompts = place(jax.tree.map(lambda x: x[numbers], self.prompts), self.mesh)
        given = (*self.net, prompts, self.grammar, self._few(count // apart))
        with on(self.mesh):
            loop, prefix = begin(*given, slots=self.slots[0], **fixed)
        # In a list, which whoever goes on empties: the arrays are given up on the way.
        return functools.partial(self._finish, numbers, [(prompts, loop, prefix)])

    def _finish(
        self, numbers: np.ndarray, begun: list[tuple[Prompts, Loop, KVCache]]
    ) -> list[Part]:
        (prompts, loop, prefix), parts = begun.pop(), list[Part]()
        fixed = {"nucleus": self.nucleus, "stride": self.stride}
        while True:
            t, done_B = fetch((loop.t, loop.done_B))
            live_WN = ~done_B.reshape(ways(self.mesh), -1, self.width).all(axis=-1)
            if t >= self.slots[-1] or not live_WN.any():
                return [*parts, (numbers, fetch(loop.sampled()))]
            size = self._size(live_WN)
            if size < live_WN.shape[1]:
                # Those that go on, and as many of those that are done as there is room for.
                keep_WN = np.argsort(~live_WN, axis=1, kind="stable")[:, :size].astype(np.int32)
                parts.append((numbers, fetch(loop.sampled())))
                numbers = np.take_along_axis(numbers.reshape(live_WN.shape), keep_WN, 1).ravel()
                whole = (prompts, loop, prefix)
                prompts, loop, prefix = taken(whole, share(keep_WN, self.mesh), live_WN.shape[1])
            if t >= loop.ids_BT.shape[1]:
                loop = grown(loop, next(n for n in self.slots if n > t))
            given = (*self.net, prompts, self.grammar, self._few(size))
            with on(self.mesh):
                loop = go_on(*given, loop, prefix, **fixed)

    def _size(self, live_WN: np.ndarray) -> int:
        """Prompts of a device in the smallest batch that holds all that go on; no more than half as
        many as there are, or as there are."""
        least, count = live_WN.sum(axis=1).max(), live_WN.shape[1]
        return min((n for n in self.sizes if least <= n <= count // 2), default=count)

    def _few(self, count: int) -> Array:
        """How many of a device's prompts may go on for the batch to shrink; 0: it does no more."""
        few = max((n for n in self.sizes if n <= count // 2), default=0)
        few_W: Array = share(np.full(ways(self.mesh), few, np.int32), self.mesh)
        return few_W


def taken(tree: Any, keep_WN: Array, count: int) -> Any:
    """Of arrays of prompts, or of their rows, the part of some prompts: those of these numbers
    among the `count` of each of W devices, so that no row goes to another one.

    The arrays are given up one after the other: little more memory is taken than they had.
    """
    return _each(lambda x: _taken(x, keep_WN, count, x.sharding), tree)


def grown(loop: Loop, slots: int) -> Loop:
    """Rows with a cache of more slots; what they had is given up, as in `taken`."""
    grow = {name: getattr(loop, name) for name in ("cache", "ids_BT", "logps_BT")}
    return loop._replace(**_each(lambda x: _grown(x, slots, x.sharding), grow))


def _each(change: Callable[[Array], Array], tree: Any) -> Any:
    def one(x: Array) -> Array:
        if not x.ndim:
            return x
        changed = change(x)
        x.delete()  # once the device has read it
        return changed

    return jax.tree.map(one, tree)


@functools.partial(jax.jit, static_argnames=("count", "layout"))
def _taken(x: Array, keep_WN: Array, count: int, layout: Sharding) -> Array:
    apart = x.reshape(keep_WN.shape[0], count, -1, *x.shape[1:])
    kept = jax.vmap(lambda part, keep_N: part[keep_N])(apart, keep_WN)
    return _laid(kept.reshape(-1, *x.shape[1:]), layout)


@functools.partial(jax.jit, static_argnames=("slots", "layout"))
def _grown(x: Array, slots: int, layout: Sharding) -> Array:
    at = x.ndim // 2  # [rows, slots], or a cache [rows, heads, slots, width]
    more = [(0, slots - size if axis == at else 0) for axis, size in enumerate(x.shape)]
    return _laid(jnp.pad(x, more), layout)


def _laid(x: Array, layout: Sharding) -> Array:
    return jax.lax.with_sharding_constraint(x, layout) if isinstance(layout, NamedSharding) else x
