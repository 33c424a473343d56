"""The interface of an encoder, and the embedding of a corpus in shards on disk."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.retrieval.shards import MappedArray, ShardWriter, create, shards
from jax_ragrl.runtime.multihost import all_gather_object, on_process_zero
from jax_ragrl.runtime.progress import Task, progress
from jax_ragrl.runtime.sharding import accelerators
from jax_ragrl.types import Passage

# Passages per call and device: enough to keep it busy, and few for a line of progress.
BATCH = 256


class Encoder(Protocol):
    """Maps texts to vectors whose inner product measures relevance."""

    @property
    def dimension(self) -> int: ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Returns float32 [Q, D]; needs at least one query."""
        ...

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Returns float32 [X, D]; needs at least one passage."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns an identity for JSON: encoders with different vectors have different ones."""
        ...

    def save(self, folder: pathlib.Path) -> None:
        """Writes the files that reopening an index needs, if the description is not enough."""
        ...


class KnownVectors(NamedTuple):
    """Vectors that an earlier index has for some of the passages."""

    vectors: MappedArray  # [Y, D] of the earlier index
    row_X: np.ndarray  # int64, the row of each passage in the earlier index; -1: a new passage


def embed(
    passages: Sequence[Passage],
    encoder: Encoder,
    folder: pathlib.Path,
    identity: str,
    dtype: str = "float32",
    known_vectors: KnownVectors | None = None,
) -> None:
    """Encodes passages and writes [X, D] in their order, shard by shard, and shows the progress.

    A call that was killed is resumed after its whole shards if the `identity` (of corpus, encoder
    and dtype) is equal, until the caller calls `shards.forget_progress`. A collective: the
    processes of a run divide the shards. Vectors in `known_vectors` are copied instead of computed.
    """
    shape = (len(passages), encoder.dimension)
    # By one process: another could delete shards that a fast one has already written.
    full_identity = on_process_zero(lambda: create(folder, shape, dtype, identity))
    share = (jax.process_index(), jax.process_count())

    def write_share() -> None:
        embed_share(passages, encoder, ShardWriter(folder, full_identity), share, known_vectors)

    all_gather_object(write_share)
    on_process_zero(lambda: ShardWriter(folder, full_identity).finish())


def embed_share(
    passages: Sequence[Passage],
    encoder: Encoder,
    writer: ShardWriter,
    share: tuple[int, int],
    known_vectors: KnownVectors | None = None,
) -> None:
    """Encodes and writes the missing shards of one process: its number, and how many there are."""
    numbers, rows = writer.missing(*share), shards(len(passages))
    total = sum(rows[number].stop - rows[number].start for number in numbers)
    with progress("embed", "passage", total) as bar:
        for number in numbers:
            writer.write(number, _vectors(passages, encoder, rows[number], known_vectors, bar))


def _vectors(
    passages: Sequence[Passage],
    encoder: Encoder,
    shard: slice,
    known_vectors: KnownVectors | None,
    bar: Task,
) -> np.ndarray:
    """Returns the vectors of a shard, float32 [S, D]: copies of the known ones and new ones.

    Passages are encoded from the longest to the shortest, so that the passages of a call have
    about the same length, and a batch that does not fit into memory fails at once.
    """
    count = shard.stop - shard.start
    vectors_SD = np.empty((count, encoder.dimension), np.float32)
    is_new_S = np.ones(count, bool)
    if known_vectors is not None:
        row_S = known_vectors.row_X[shard]
        is_new_S = row_S < 0
        vectors_SD[~is_new_S] = known_vectors.vectors.take(row_S[~is_new_S])
        bar.update(count - int(is_new_S.sum()))
    rows_S = passages[shard]
    new = sorted(np.flatnonzero(is_new_S).tolist(), key=lambda n: -len(passage_text(rows_S[n])))
    count = BATCH * max(1, len(accelerators()))
    for start in range(0, len(new), count):
        places = new[start : start + count]
        vectors_SD[places] = encoder.encode_passages([rows_S[n] for n in places])
        bar.update(len(places))
    return vectors_SD
