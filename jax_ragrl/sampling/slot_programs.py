"""The programs that slots call, listed before they are called.

A `SlotEngine` calls a program to decode for each number of slots and size of the contexts, and
programs to prefill for each size of the contexts and shape of a chunk. The lists have all of these
shapes that some jobs can reach, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.compile_ahead import Program
from jax_ragrl.runtime.sharding import (
    data_parallel_size,
    hinted_sharding,
    mesh_of,
    replicate,
    shard_batch,
    sharding_of_results,
)
from jax_ragrl.sampling.context_cache import (
    capacity_for,
    chunk_counts,
    chunk_lengths,
    first_capacity,
    first_chunk_capacity,
    kept_pages,
)
from jax_ragrl.sampling.contexts import PAGE
from jax_ragrl.sampling.decode import check_stride
from jax_ragrl.sampling.engine import JobGroup, slot_counts
from jax_ragrl.sampling.jobs import SamplingJob, Shapes
from jax_ragrl.sampling.slots import (
    AXES,
    DecodeLimits,
    decode_name,
    decode_slots,
    empty_pages,
    empty_slots,
    extend_contexts,
    prefill_name,
    start_contexts,
)
from jax_ragrl.text.tokenizer import ChatTokenizer


class DecodeShape(NamedTuple):
    """The shape of a program that decodes.

    Fields:
      capacity: tokens per context.
      slots: slots per device.
    """

    capacity: int
    slots: int


class ChunkShape(NamedTuple):
    """The shape of a program that prefills.

    Fields:
      capacity: tokens per context, of a first chunk those of its pages.
      length: tokens of a chunk.
      contexts: contexts per device, padding included.
      is_first: whether the chunk is the first one of its contexts.
    """

    capacity: int
    length: int
    contexts: int
    is_first: bool

    def argument_shapes(self, devices: int) -> list[tuple[int, ...]]:
        """Returns the shapes of a table of pages, of the tokens and of their starts."""
        table, rows = (devices, self.contexts, self.capacity // PAGE), devices * self.contexts
        return [table, (rows, self.length), (rows,)]


def decode_shapes(shapes: Shapes, limit: int) -> list[DecodeShape]:
    """Returns the shapes of programs that decode, descending.

    Args:
      shapes: the static shapes of sampling, with `decode_rows`.
      limit: the smallest maximum of new tokens of a job.
    """
    capacities = _capacities(first_capacity(1, limit, shapes), shapes)
    return [DecodeShape(c, slots) for c in capacities for slots in slot_counts(shapes, c)[::-1]]


def chunk_shapes(shapes: Shapes, limit: int) -> list[ChunkShape]:
    """Returns the shapes of programs that prefill, descending; arguments as in `decode_shapes`."""
    chunks = list[ChunkShape]()
    for length in chunk_lengths(shapes):
        for is_first in (True, False):
            prompt = _shortest_prompt(length, is_first, shapes)
            # The longest prompt may be too short for two chunks.
            if prompt <= shapes.prompt_lengths[-1]:
                for capacity in _capacities(first_capacity(prompt, limit, shapes), shapes):
                    pages = first_chunk_capacity(length) if is_first else capacity
                    counts = chunk_counts(length, slot_counts(shapes, capacity)[-1], shapes)
                    chunks += [ChunkShape(pages, length, count, is_first) for count in counts]
    return sorted({*chunks}, reverse=True)  # contexts of all sizes have the same first chunks


def _capacities(smallest: int, shapes: Shapes) -> list[int]:
    """Returns the sizes of contexts that grow from the smallest size to the largest, descending."""
    sizes = [smallest]
    while sizes[-1] < capacity_for(shapes.longest, shapes):
        sizes.append(capacity_for(sizes[-1] + 1, shapes))
    return sizes[::-1]


def _shortest_prompt(length: int, is_first: bool, shapes: Shapes) -> int:
    """Returns the tokens of the shortest prompt with a chunk of a length."""
    # Chunks of the shortest length alone may have padding.
    tokens = 1 if length == chunk_lengths(shapes)[0] else length
    # A later chunk follows at least one token; the last token of a prompt is in no chunk.
    return tokens + (1 if is_first else 2)


def slot_programs(
    model: SplitModel, tokenizer: ChatTokenizer, jobs: Sequence[SamplingJob], shapes: Shapes
) -> list[Program]:
    """Returns the programs that sample jobs in slots, those that take longest first.

    Not listed are the small programs that load, store and resize slots.

    Args:
      model, tokenizer, shapes: as in `SlotEngine`.
      jobs: as in `sampler_programs`.
    """
    if not jobs:
        return []
    mesh = mesh_of(model.params)
    # A grammar may be large, so one copy of it serves all programs of a job.
    groups = [JobGroup(tokenizer, job, mesh) for job in jobs]
    decoding = [(shape, group) for group in groups for shape in decode_shapes(shapes, group.limit)]
    decoding.sort(key=lambda pair: pair[0], reverse=True)
    chunks = chunk_shapes(shapes, limit=min(group.limit for group in groups))
    return [
        *(_decode_program(model, group, shapes, shape) for shape, group in decoding),
        *(_prefill_program(model, shapes, chunk) for chunk in chunks),
    ]


def _decode_program(
    model: SplitModel, group: JobGroup, shapes: Shapes, shape: DecodeShape
) -> Program:
    mesh = mesh_of(model.params)
    devices = data_parallel_size(mesh)
    state = empty_slots.eval_shape(
        model.merge().config,
        shape.slots * devices,
        shape.capacity,
        shapes.max_new_tokens,
        is_strict=group.automaton is not None,
    )
    zero = np.int32(0)
    limits = replicate(DecodeLimits(np.zeros(devices, np.int32), zero, zero), mesh)
    args = (model, _on_devices(state, model), group.grammar, limits)
    options = {"use_top_p": group.use_top_p, "stride": check_stride()}
    kind = group.grammar.describe(use_top_p=group.use_top_p)
    name = decode_name(shape.slots, shape.capacity, kind)
    return Program(name, decode_slots, args, options, mesh)


def _prefill_program(model: SplitModel, shapes: Shapes, chunk: ChunkShape) -> Program:
    mesh = mesh_of(model.params)
    devices = data_parallel_size(mesh)
    pages = empty_pages.eval_shape(model.merge().config, devices, kept_pages(shapes))
    arrays = [np.zeros(n, np.int32) for n in chunk.argument_shapes(devices)]
    table, ids, start = shard_batch(arrays, mesh)
    args = (model, _on_devices(pages, model), table)
    name = prefill_name(chunk.contexts, chunk.length, chunk.capacity)
    if chunk.is_first:
        return Program(name, start_contexts, (*args, ids), mesh=mesh)
    return Program(name, extend_contexts, (*args, table, ids, start), mesh=mesh)


def _on_devices(tree: Any, model: SplitModel) -> Any:
    """Returns abstract arrays with the shardings that they have in programs with a model."""
    mesh = mesh_of(model.params)
    alone = None if mesh is not None else sharding_of_results(model)

    def place(x: Any) -> jax.ShapeDtypeStruct:
        layout = alone if mesh is None else hinted_sharding(AXES[x.ndim], x.shape, mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return jax.tree.map(place, tree)
