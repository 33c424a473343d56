"""Contexts on the devices: prompts are computed in chunks, and kept in pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jax import Array

from jax_ragrl.models.decoder import KVCache
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.sharding import (
    commit_like,
    data_parallel_size,
    mesh_context,
    mesh_of,
    shard_batch,
)
from jax_ragrl.sampling.contexts import PAGE, KeptContexts, Reservation, page_count
from jax_ragrl.sampling.counters import SamplingCounters
from jax_ragrl.sampling.grouping import decode_floor, divide, fewest_rows
from jax_ragrl.sampling.jobs import Shapes
from jax_ragrl.sampling.slots import (
    empty_pages,
    extend_contexts,
    prefill_name,
    start_contexts,
    store_slots,
)

# Prompts are computed in chunks of these lengths, the largest first, so that little is padding.
CHUNKS = (16, 64, 256, 1024)
# Programs that store contexts, or extend them, take these numbers of contexts per device.
COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
MIN_CAPACITY = 64  # tokens per context at first, whole pages; it doubles up to the longest context
NOTHING = 2**30  # a number that stands for padding


class ContextCache:
    """The contexts that the devices keep, with their keys and values.

    Args:
      model: a split decoder.
      shapes: the static shapes of sampling.
      counters: counts the work.

    Attributes:
      by_device: the index of the contexts of each device.
      capacity: tokens per context of the next programs.
      pages: the keys and values.
    """

    def __init__(self, model: SplitModel, shapes: Shapes, counters: SamplingCounters) -> None:
        self._model, self._shapes, self._counters = model, shapes, counters
        self._mesh = mesh_of(model.params)
        devices, count = data_parallel_size(self._mesh), kept_pages(shapes)
        self.by_device = [KeptContexts(count) for _ in range(devices)]
        self.capacity = MIN_CAPACITY
        with mesh_context(self._mesh):
            pages = empty_pages(model.merge().config, devices, count)
        self.pages: KVCache = commit_like(pages, model)

    def compute(self, wave: Sequence[Sequence[Reservation]]) -> None:
        """Computes the reserved contexts, from the tokens on that are not kept yet."""
        for chunk in _chunks(wave, self._shapes):
            self._extend(*chunk)
        # From now on prompts may match the new contexts.
        for device, part in zip(self.by_device, wave, strict=True):
            device.commit(part)

    def _extend(
        self, parts: Sequence[Sequence[tuple[Reservation, int]]], count: int, length: int
    ) -> None:
        """Runs the next chunk of some contexts, each from its own place on."""
        ids, start = (
            np.zeros((len(parts), count, length), np.int32),
            np.zeros((len(parts), count), np.int32),
        )
        # The last chunk of a context is padded on the right.
        for d, part in enumerate(parts):
            for i, (reservation, at) in enumerate(part):
                tokens = reservation.ids[at : at + length]
                ids[d, i, : len(tokens)], start[d, i] = tokens, at
        ids_BL, start_B = shard_batch((ids.reshape(-1, length), start.reshape(-1)), self._mesh)
        new = [[r.pages_of(at, at + length) for r, at in part] for part in parts]
        old = [[r.pages_before(at) for r, at in part] for part in parts]
        is_first = not start.any()
        capacity = first_chunk_capacity(length) if is_first else self.capacity
        write = self._tables(new, count, capacity)
        name = prefill_name(count, length, capacity)
        with mesh_context(self._mesh), report_compiling(name):
            if is_first:
                self.pages = start_contexts(self._model, self.pages, write, ids_BL)
            else:
                read = self._tables(old, count, capacity)
                arguments = (self.pages, read, write, ids_BL, start_B)
                self.pages = extend_contexts(self._model, *arguments)
        self._counters.add_prefill(len(parts) * count, length)

    def store(self, cache: KVCache, slots: Sequence[Sequence[tuple[int, np.ndarray]]]) -> None:
        """Keeps the contexts of some slots, as far as there is room.

        Args:
          cache: the keys and values of all slots.
          slots: for each device the numbers of slots, with the int32 tokens of their contexts.
        """
        stored = [
            [(slot, r) for slot, ids in part if (r := device.reserve(ids)) is not None]
            for device, part in zip(self.by_device, slots, strict=True)
        ]
        count = copy_count(max(map(len, slots)))
        sources = self.numbers([[slot for slot, _ in part] for part in stored], count)
        new = [[r.pages_of(r.start, len(r.ids)) for _, r in part] for part in stored]
        write = self._tables(new, count, self.capacity)
        with mesh_context(self._mesh):
            self.pages = store_slots(self.pages, cache, sources, write)
        for device, part in zip(self.by_device, stored, strict=True):
            device.commit([r for _, r in part])

    def tables(self, parts: Sequence[Sequence[Reservation]], count: int) -> Array:
        """Returns the pages of contexts on the devices, int32 `[D, count, T]`."""
        pages = [[r.pages_before(len(r.ids)) for r in part] for part in parts]
        return self._tables(pages, count, self.capacity)

    def numbers(self, parts: Sequence[Sequence[int]], count: int) -> Array:
        """Returns numbers on the devices, int32 `[D, count]`."""
        # Padding is past the end: reading it takes any row, and writing it does nothing.
        numbers_DN = np.full((len(parts), count), NOTHING, np.int32)
        for d, part in enumerate(parts):
            numbers_DN[d, : len(part)] = part
        return shard_batch(numbers_DN, self._mesh)

    def _tables(
        self, parts: Sequence[Sequence[Mapping[int, int]]], count: int, capacity: int
    ) -> Array:
        """Returns numbers of pages by their places in contexts, int32 `[D, count, T]`."""
        numbers_DNT = np.full((len(parts), count, capacity // PAGE), NOTHING, np.int32)
        for d, part in enumerate(parts):
            for i, pages in enumerate(part):
                numbers_DNT[d, i, [*pages]] = [*pages.values()]
        return shard_batch(numbers_DNT, self._mesh)


def kept_pages(shapes: Shapes) -> int:
    """Returns the pages per device that keep contexts."""
    # The longest context may need a page more, of which it copies the first tokens.
    return shapes.contexts * page_count(shapes.longest) + 1


def first_chunk_capacity(length: int) -> int:
    """Returns the tokens of the pages that hold the first chunk of a context."""
    return page_count(length) * PAGE


def capacity_for(tokens: int, shapes: Shapes) -> int:
    """Returns the static size that contexts of a number of tokens have.

    It is a power of two, unless the longest context of `shapes` needs less.
    """
    # Another size is another set of programs, and short contexts cost an accelerator little.
    least = max(MIN_CAPACITY, decode_floor())
    doubled = least * 2 ** max(0, math.ceil(math.log2(tokens / least)))
    return min(doubled, math.ceil(shapes.longest / MIN_CAPACITY) * MIN_CAPACITY)


def first_capacity(prompt: int, limit: int, shapes: Shapes) -> int:
    """Returns the static size that a context has before it grows.

    Args:
      prompt: the tokens of the prompt.
      limit: the maximum of new tokens. Longer actions make the context grow later, unless the
        tokens of all slots have a limit: then it has room for the longest.
      shapes: the static shapes of sampling.
    """
    new = limit if shapes.slot_tokens else min(limit, shapes.initial_cache_size)
    return capacity_for(prompt + new, shapes)


def chunk_lengths(shapes: Shapes) -> list[int]:
    """Returns the lengths of chunks, ascending."""
    # A prompt has one more token than the chunks of its context.
    most = min(shapes.max_prompt_tokens, shapes.prompt_lengths[-1] - 1)
    shortest = min(CHUNKS[0], shapes.max_prompt_tokens)
    return [shortest, *(n for n in CHUNKS if shortest < n <= most)]


def chunk_counts(length: int, slots: int, shapes: Shapes) -> list[int]:
    """Returns the numbers of contexts that programs for chunks of a length take, ascending.

    Args:
      length: tokens of a chunk.
      slots: the most slots per device. No more prompts start together.
      shapes: the static shapes of sampling.
    """
    # A program for more contexts is the cheapest one for that many prompts, if for any number.
    largest = _chunk_count(slots, length, shapes)
    return [n for n in _chunk_sizes(length, shapes) if n <= slots or n == largest]


def _chunks(
    wave: Sequence[Sequence[Reservation]], shapes: Shapes
) -> Iterator[tuple[list[list[tuple[Reservation, int]]], int, int]]:
    """Divides the rest of some contexts into chunks, the longest first.

    Yields:
      For each device contexts with the place of their next token, then the number of contexts per
      device, padding included, and the length of the chunk.
    """
    lengths = chunk_lengths(shapes)
    places = [{k: (r, r.start) for k, r in enumerate(part)} for part in wave]
    while True:
        rest = [{k: len(r.ids) - at for k, (r, at) in part.items()} for part in places]
        longest = max((n for part in rest for n in part.values()), default=0)
        if longest <= 0:
            return
        length = max((n for n in lengths if n <= longest), default=lengths[0])
        least = 1 if length == lengths[0] else length
        ready = [[k for k, n in part.items() if n >= least] for part in rest]
        # First chunks have a faster program.
        first = [
            [k for k in numbers if part[k][1] == 0]
            for part, numbers in zip(places, ready, strict=True)
        ]
        ready = first if any(first) else ready
        count = _chunk_count(max(map(len, ready)), length, shapes)
        chunk = [
            {k: part[k] for k in numbers[:count]}
            for part, numbers in zip(places, ready, strict=True)
        ]
        yield [[*part.values()] for part in chunk], count, length
        for part, own in zip(places, chunk, strict=True):
            part |= {k: (r, at + length) for k, (r, at) in own.items()}


def _chunk_count(contexts: int, length: int, shapes: Shapes) -> int:
    """Returns how many contexts the next program takes, padding included."""
    # A program reads all weights, which costs as much as some tokens.
    costs = {n: decode_floor() + n * length for n in _chunk_sizes(length, shapes)}
    _, batches = divide([length] * contexts, {length: costs})
    return max(size for *_, size in batches)


def _chunk_sizes(length: int, shapes: Shapes) -> list[int]:
    least = min(fewest_rows(), shapes.max_prompt_tokens)
    first = next(n for n in COUNTS if n * length >= least)
    return [first, *(n for n in COUNTS if n > first and n * length <= shapes.max_prompt_tokens)]


def copy_count(contexts: int) -> int:
    """Returns the static number of contexts of a program that loads or stores them."""
    return next(n for n in COUNTS if n >= contexts)
