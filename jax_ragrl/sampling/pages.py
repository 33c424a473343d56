"""The keys and values of kept contexts on a device, in pages (`sampling/contexts.py`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_ragrl.models.decoder import KVCache, init_cache
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.sharding import (
    commit_like,
    constrain,
    hinted_sharding,
    mesh_context,
    mesh_of,
    replicate,
)
from jax_ragrl.sampling.contexts import PAGE, KeptContexts, page_count
from jax_ragrl.types import Tensor

NOTHING = 2**30  # a page number that stands for none: it reads any page, and writes nothing
AXES = (None, "kv", None, None)


class KeptPrefix(NamedTuple):
    """The first tokens of the prompts of a batch, whose keys and values are kept.

    Fields:
      pages: all kept keys and values, `[M, K, PAGE, F]` per layer.
      number_BT: int32, the pages of each prompt in order, or `NOTHING`.
      length_B: int32 tokens of each prompt that they hold.
    """

    pages: KVCache
    number_BT: Tensor
    length_B: Tensor

    @property
    def size(self) -> int:
        return int(self.number_BT.shape[1]) * PAGE

    def cache(self) -> KVCache:
        """Returns a copy for each prompt, `[B, K, size, F]` per layer."""

        def take(x: Array) -> Array:
            page_BTKPF = x.at[self.number_BT].get(mode="clip")
            shape = len(page_BTKPF), x.shape[1], self.size, x.shape[3]
            return jnp.swapaxes(page_BTKPF, 1, 2).reshape(shape)

        return jax.tree.map(take, self.pages)


class ContextCache:
    """The contexts that a device keeps from call to call, with room for some tokens."""

    def __init__(self, model: SplitModel, tokens: int) -> None:
        self._mesh = mesh_of(model.params)
        self.index = KeptContexts(page_count(tokens))
        with mesh_context(self._mesh):
            pages = init_cache(model.merge().config, page_count(tokens), PAGE)
        if self._mesh is None:
            self.pages: KVCache = commit_like(pages, model)
        else:
            layout = hinted_sharding(AXES, pages.k[0].shape, self._mesh)
            self.pages = jax.device_put(pages, layout)

    def kept_tokens(self, ids: Sequence[int]) -> int:
        """Returns the number of first tokens of a prompt that are kept, and pins them."""
        return PAGE * len(self.index.match(np.array(ids, np.int32)))

    def prefix(self, matches: Sequence[Sequence[int]], batch: int, length: int) -> KeptPrefix:
        """Returns the kept beginnings of the prompts of a batch, whose pages are `matches`.

        `batch` prompts and the `length` of the longest one in tokens include padding.
        """
        numbers = {b: dict(enumerate(pages)) for b, pages in enumerate(matches)}
        number_BT = _table(numbers, batch, page_count(length))
        length_B = PAGE * np.sum(number_BT < NOTHING, axis=1, dtype=np.int32)
        return KeptPrefix(self.pages, *replicate((number_BT, length_B), self._mesh))

    def keep(
        self,
        prompts: Mapping[int, np.ndarray],
        ids_RT: Tensor,
        count_R: Tensor,
        length_B: Array,
        prefix: KVCache,
        cache: KVCache,
    ) -> None:
        """Keeps the contexts of some prompts of a batch, and of their rows.

        Args:
          prompts: int32 tokens of the prompts, by their places in the batch.
          ids_RT, count_R: int32 tokens of all rows, and their number, on the host.
          length_B: int32 tokens of all prompts.
        """
        width = len(cache.k[0]) // len(prefix.k[0])
        of_prompt, of_row = dict[int, dict[int, int]](), dict[int, dict[int, int]]()
        for b, ids in prompts.items():
            of_prompt[b] = self.index.add(ids)
            for r in range(b * width, (b + 1) * width):
                context = np.concatenate([ids, ids_RT[r, : count_R[r]]])
                # The first page of a row may begin with the last tokens of the prompt.
                first, pages = len(ids) // PAGE, self.index.add(context)
                of_row[r] = {place - first: number for place, number in pages.items()}
        if not any((*of_prompt.values(), *of_row.values())):
            return
        tables = (
            _table(of_prompt, len(prefix.k[0]), page_count(prefix.k[0].shape[2])),
            _table(of_row, len(cache.k[0]), page_count(cache.k[0].shape[2]) + 1),
        )
        with mesh_context(self._mesh):
            arguments = self.pages, prefix, cache, length_B, *replicate(tables, self._mesh)
            self.pages = keep_contexts(*arguments)


def _table(pages: Mapping[int, Mapping[int, int]], count: int, size: int) -> np.ndarray:
    """Returns numbers of pages by their places, int32 `[count, size]`."""
    numbers_NT = np.full((count, size), NOTHING, np.int32)
    for n, places in pages.items():
        numbers_NT[n, [*places]] = [*places.values()]
    return numbers_NT


@in_order
@functools.partial(jax.jit, donate_argnames=("pages",))
def keep_contexts(
    pages: KVCache,
    prefix: KVCache,
    cache: KVCache,
    length_B: Array,
    prompt_BT: Array,
    row_RT: Array,
) -> KVCache:
    """Writes the keys and values of a batch to pages.

    Args:
      pages: all kept keys and values; donated.
      length_B: int32 tokens of each prompt.
      prompt_BT: int32 numbers of the pages of each prompt, from its first token on.
      row_RT: int32 numbers of the pages of each row, from the first page on that its prompt does
        not fill.
    """
    width = len(row_RT) // len(prompt_BT)
    # The tokens of the prompt in the first page of a row, then its own ones.
    tail_BP = (length_B // PAGE * PAGE)[:, None] + jnp.arange(PAGE)[None]
    own_R1 = jnp.repeat(length_B % PAGE, width)[:, None]
    place_RJ = jnp.zeros_like(own_R1) + jnp.arange(row_RT.shape[1] * PAGE)[None]
    place_RJ = jnp.where(place_RJ < own_R1, place_RJ, PAGE - own_R1 + place_RJ)

    def put(x: Array, prefix_BKSF: Array, cache_RKSF: Array) -> Array:
        tail_RKPF = jnp.repeat(_tokens(prefix_BKSF, tail_BP), width, axis=0)
        row_RKSF = _tokens(jnp.concatenate([tail_RKPF, cache_RKSF], axis=2), place_RJ)
        x = _write(_write(x, prompt_BT, prefix_BKSF), row_RT, row_RKSF)
        return constrain(x, AXES)

    return jax.tree.map(put, pages, prefix, cache)


def _tokens(x_NKSF: Array, place_NJ: Array) -> Array:
    """Returns the tokens at some places of each context; a place past the end takes the last."""
    taken: Array = jax.vmap(lambda x, at: x.at[:, at].get(mode="clip"))(x_NKSF, place_NJ)
    return taken


def _write(pages: Any, number_NT: Array, x_NKSF: Array) -> Any:
    missing = number_NT.shape[1] * PAGE - x_NKSF.shape[2]
    x_NKSF = jnp.pad(x_NKSF, ((0, 0), (0, 0), (0, missing), (0, 0)))
    split = x_NKSF.reshape(*x_NKSF.shape[:2], -1, PAGE, x_NKSF.shape[3])
    return pages.at[number_NT].set(jnp.swapaxes(split, 1, 2), mode="drop")
