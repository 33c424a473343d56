"""Batches of texts of similar length, padded to few shapes, because each shape compiles a program.

Encoders and cross-encoders run on them. Fine steps of length matter most: a text of 100 tokens that
is padded to 128 costs a quarter more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array

from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.free_work import count_elements, free_tokens
from jax_ragrl.runtime.sharding import (
    data_parallel_size,
    mesh_context,
    mesh_of,
    shard_batch,
    to_host,
)

ROW_BUCKETS = (1, 4, 16, 64)
# Steps of an eighth of the length, so that at most that share of a batch is padding.
LENGTH_BUCKETS = (
    *range(16, 64, 8),
    *range(64, 128, 16),
    *(length for start in (128, 256, 512, 1024) for length in range(start, 2 * start, start // 8)),
    *(2048, 3072, 4096, 6144, 8192),
)
# Steps of a quarter for an accelerator, which compiles each shape for seconds; of these only powers
# of two if the time of a batch is negligible.
COARSE_LENGTH_BUCKETS = (
    *range(64, 128, 16),
    *(length for start in (128, 256, 512, 1024) for length in range(start, 2 * start, start // 4)),
    *(2048, 3072, 4096, 6144, 8192),
)
# Pairs of tokens that attend to each other in one batch: this bounds the memory of the scores.
MAX_TOKEN_PAIRS = 64 * 512**2
# Tokens of one batch on a CPU: the activations fit into its caches, and fewer texts per batch
# differ less in length. An accelerator needs more to be busy.
CPU_TOKENS = 4096
# On a CPU less padding than this costs no more than another batch, which reads all weights again.
CPU_PADDING = 64


class TextBatch(NamedTuple):
    """Texts padded on the right, `[R, L]`: int32 token ids, a bool mask, False at padding.

    `types` are int32 segments: 1 for the second text of a pair, else 0.
    """

    ids: np.ndarray
    mask: np.ndarray
    types: np.ndarray


def bucket_size(n: int, sizes: Sequence[int]) -> int:
    """Returns the first size that holds n; the last if none does."""
    return next((size for size in sizes if size >= n), sizes[-1])


def length_buckets(free: int) -> list[int]:
    """Returns the padded lengths of texts, if `free` tokens take negligible time; 0 on a CPU."""
    if not free:
        return [*LENGTH_BUCKETS]
    return [n for n in COARSE_LENGTH_BUCKETS if n.bit_count() == 1 or max_rows(n) * n > free]


def max_rows(length: int, most_tokens: float = math.inf) -> int:
    """Returns the maximum of rows per device of a length, in a batch of at most `most_tokens`."""
    most = min(MAX_TOKEN_PAIRS // length**2, most_tokens // length)
    return max((rows for rows in ROW_BUCKETS if rows <= most), default=ROW_BUCKETS[0])


def length_batches(
    lengths: Sequence[int], most_tokens: float | None = None, devices: int = 1, free: int = 0
) -> Iterator[list[int]]:
    """Yields the indices of texts in batches of similar length, longest first.

    The batch that takes most memory is first, so one that does not fit fails at once.

    Args:
      most_tokens: of one batch, with padding; None: what suits the default backend.
      devices: the accelerators that share a batch. The devices of a CPU share its cores, so that a
        limit of tokens holds for all of them.
      free: as for `length_buckets`.
    """
    if most_tokens is None:
        most_tokens = CPU_TOKENS if jax.default_backend() == "cpu" else math.inf
    # Similar lengths share a batch, so little of it is padding.
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    buckets = length_buckets(free)
    while order:
        length = bucket_size(lengths[order[0]], buckets)
        rows = max_rows(length, most_tokens)
        if most_tokens < math.inf:
            rows = min(rows, len(order))
            missing = bucket_size(rows, ROW_BUCKETS) - rows
            # If over a fifth would be padding, a batch fills a smaller bucket.
            if missing * length >= CPU_PADDING and 5 * missing > missing + rows:
                rows = max(n for n in ROW_BUCKETS if n <= rows)
        else:
            # An accelerator takes as long for few rows as for some more.
            rows = devices * rows
        yield order[:rows]
        order = order[rows:]


def pad_rows(
    rows: Sequence[Sequence[int]],
    pad_id: int,
    max_length: int,
    *,
    types: Sequence[Sequence[int]] | None = None,
    devices: int = 1,
    free: int = 0,
) -> TextBatch:
    """Pads token ids to a bucket of rows and of length.

    Args:
      max_length: the longest input, which is a bucket too.
      types: the segments of each text; None: one segment.
      devices: the devices that share a batch; their number divides the rows.
      free: as for `length_buckets`.
    """
    lengths = (*(n for n in length_buckets(free) if n < max_length), max_length)
    longest = bucket_size(max(map(len, rows)), lengths)
    fewest = devices * max_rows(longest, free) if free else 1
    # Devices that share a batch have a bucket of rows each, or for all of them.
    counts = {n + -n % devices for n in ROW_BUCKETS} | {n * devices for n in ROW_BUCKETS}
    shape = bucket_size(max(len(rows), fewest), sorted(counts)), longest
    batch = TextBatch(
        np.full(shape, pad_id, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32)
    )
    for n, row in enumerate(rows):
        batch.ids[n, : len(row)] = row
        batch.mask[n, : len(row)] = True
        if types is not None:
            batch.types[n, : len(row)] = types[n]
    return batch


@in_order
@functools.partial(jax.jit, static_argnames=("graph",))
def run_model(graph: nnx.GraphDef, state: nnx.State, *arrays: Array) -> Array:
    """Returns the output of a split module of texts, whose fields of `TextBatch` are the arrays."""
    return nnx.merge(graph, state)(*arrays)


def run_in_batches(
    graph: nnx.GraphDef,
    state: nnx.State,
    rows: Sequence[Sequence[int]],
    pad_id: int,
    max_length: int,
    types: Sequence[Sequence[int]] | None = None,
) -> np.ndarray:
    """Returns the output of a split module for each text, in order; there is at least one text.

    `rows` are token ids; `types`, `pad_id` and `max_length` are as in `pad_rows`. The devices of
    the module's mesh share each batch.
    """
    mesh = mesh_of(state)
    devices, free = data_parallel_size(mesh), free_tokens(count_elements(state), mesh)
    batches = list(length_batches([len(row) for row in rows], devices=devices, free=free))
    # All batches are queued before the first is fetched: the devices never wait for the host.
    outputs = []
    for numbers in batches:
        own = None if types is None else [types[n] for n in numbers]
        texts = [rows[n] for n in numbers]
        batch = pad_rows(texts, pad_id, max_length, types=own, devices=devices, free=free)
        with mesh_context(mesh):
            arrays = shard_batch(batch[:2] if types is None else tuple(batch), mesh)
            outputs.append(run_model(graph, state, *arrays))
    result = np.zeros((len(rows), *outputs[0].shape[1:]), outputs[0].dtype)
    for numbers, output in zip(batches, outputs, strict=True):
        result[numbers] = to_host(output)[: len(numbers)]  # rows after these are padding
    return result
