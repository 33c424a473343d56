"""Memory and traffic of sampling in slots (`sampling/engine.py`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.split import SplitModel
from jax_ragrl.plan.abstract_arrays import (
    Program,
    batch_array,
    bytes_of,
    compile_program,
    compile_trace,
    replicated_array,
    with_shardings,
)
from jax_ragrl.plan.operations import head_flops, layers_flops
from jax_ragrl.plan.traffic import loop_traffic
from jax_ragrl.runtime.sharding import data_parallel_size
from jax_ragrl.sampling.context_cache import capacity_for, chunk_lengths, kept_pages
from jax_ragrl.sampling.decode import Grammar
from jax_ragrl.sampling.jobs import Shapes
from jax_ragrl.sampling.slot_programs import ChunkShape, DecodeShape, chunk_shapes, decode_shapes
from jax_ragrl.sampling.slots import (
    DecodeLimits,
    decode_slots,
    empty_pages,
    empty_slots,
    extend_contexts,
)


def count_slots(
    shapes: Shapes, config: DecoderConfig, model: SplitModel, mesh: Mesh, *, nucleus: bool
) -> dict[str, Any]:
    """Counts what `count_sampling` counts, for the slots that hold the most tokens.

    Args:
      shapes: static shapes of sampling, with `decode_rows`.
      config: architecture, with the compute dtype.
      model: the abstract copy of the weights for sampling.
      mesh: devices of the run.
      nucleus: whether tokens are sampled with a nucleus filter.

    Returns:
      `prompts` is [slots, tokens per context]. `begun_bytes` are the pages of kept contexts.
    """
    devices = data_parallel_size(mesh)
    # Every device has its slots and contexts.
    capacity, slots = _largest_slots(shapes)
    rows = slots * devices
    # A prefill runs one chunk of the largest size.
    longest, length = capacity_for(shapes.longest, shapes), chunk_lengths(shapes)[-1]
    chunk = ChunkShape(longest, length, contexts=1, is_first=False)
    with jax.set_mesh(mesh):
        pages = _on_devices(empty_pages.lower(config, devices, kept_pages(shapes)))
        new = shapes.max_new_tokens
        state = _on_devices(empty_slots.lower(config, rows, capacity, new, is_strict=False))
        prefill = _compile_prefill(model, pages, chunk, mesh)
        widest = _compile_prefill(model, pages, _widest_chunk(shapes, chunk), mesh)
        decode = _compile_decode(model, state, mesh, nucleus)
    step, programs = loop_traffic(decode.text), (prefill, widest, decode)
    assert step is not None, "a decode has a loop over tokens"
    share = devices / mesh.size  # a tensor axis splits the operations of its rows
    chunk_flops = length * layers_flops(config, longest)
    row_flops = layers_flops(config, capacity) + head_flops(config)
    return {
        "prompts": [rows, capacity],
        "width": 1,
        "prefill_tokens": devices * length,
        "temporary_bytes": bytes_of(state) + max(p.facts["temporary_bytes"] for p in programs),
        "begun_bytes": bytes_of(pages),
        "compile_s": round(prefill.facts["compile_s"] + decode.facts["compile_s"], 1),
        "prefill": prefill.traffic().facts() | {"flops": share * chunk_flops},
        "decode_step": step.facts() | {"flops": share * slots * row_flops},
    }


def _largest_slots(shapes: Shapes) -> DecodeShape:
    """Returns the slots with the most tokens; of several sizes, the one with the most slots."""
    sizes = decode_shapes(shapes, limit=1)
    return max(sizes, key=lambda size: (size.capacity * size.slots, size.slots))


def _widest_chunk(shapes: Shapes, default: ChunkShape) -> ChunkShape:
    """Returns the chunk that reads the most tokens of contexts; `default` if all are first ones."""
    later = [chunk for chunk in chunk_shapes(shapes, limit=1) if not chunk.is_first]
    return max(later, key=lambda chunk: (chunk.contexts * chunk.capacity, chunk), default=default)


def _compile_prefill(model: SplitModel, pages: Any, chunk: ChunkShape, mesh: Mesh) -> Program:
    """Compiles the prefill of a later chunk."""
    shapes = chunk.argument_shapes(data_parallel_size(mesh))
    table, ids, start = (batch_array(shape, jnp.int32, mesh) for shape in shapes)
    return compile_program(extend_contexts.lower(model, pages, table, table, ids, start), mesh)


def _compile_decode(model: SplitModel, state: Any, mesh: Mesh, nucleus: bool) -> Program:
    """Compiles the decoding of slots without a grammar."""
    grammar = Grammar(replicated_array((2,), jnp.int32, mesh))
    shapes = ((data_parallel_size(mesh),), (), ())
    limits = DecodeLimits(*(replicated_array(shape, jnp.int32, mesh) for shape in shapes))
    trace = decode_slots.lower(model, state, grammar, limits, use_top_p=nucleus)
    return compile_program(trace, mesh)


def count_slot_programs(shapes: Shapes) -> int:
    """Returns the most programs that decode or prefill: for each size that contexts grow through.

    A run with `run.compile_ahead` compiles as many for a policy with one grammar, and fewer if the
    limits of its roles rule out the smallest contexts.

    Args:
      shapes: static shapes of sampling, with `decode_rows`.
    """
    # Replies of one token begin with the smallest contexts.
    return len(decode_shapes(shapes, limit=1)) + len(chunk_shapes(shapes, limit=1))


def _on_devices(trace: Any) -> Any:
    """The abstract results of a program, with the shardings that it gives them."""
    return with_shardings(trace.out_info, compile_trace(trace).output_shardings)
