"""Passages to vectors: what an encoder is, and its vectors on disk as TensorStore shards."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorstore
import tqdm

from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage

BATCH = 1024  # passages encoded at once: enough for an encoder to sort them by length
SHARD_BYTES = 1 << 26


class Encoder(Protocol):
    """Texts to vectors whose inner product says how well they match."""

    @property
    def dimension(self) -> int: ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """float32 [Q, D]; at least one query."""
        ...

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """float32 [X, D]; at least one passage."""
        ...

    def describe(self) -> dict[str, Any]:
        """A JSON-able identity: encoders that differ in a vector differ here."""
        ...

    def save(self, folder: pathlib.Path) -> None:
        """Writes what reopening an index needs beyond the description; may write nothing."""
        ...


def _spec(folder: pathlib.Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder.resolve()}/"}}


def _create(folder: pathlib.Path, count: int, dimension: int) -> tensorstore.TensorStore:
    """A new float32 [count, dimension] store, sharded by rows; an older one is deleted."""
    # Whole batches a shard: no shard is written twice.
    rows = max(1, SHARD_BYTES // (4 * dimension * BATCH)) * BATCH
    layout = tensorstore.ChunkLayout(chunk_shape=[min(count, rows), dimension])
    return tensorstore.open(
        _spec(folder),
        create=True,
        delete_existing=True,
        dtype=tensorstore.float32,
        shape=[count, dimension],
        chunk_layout=layout,
    ).result()


def write_vectors(vectors_XD: np.ndarray, folder: pathlib.Path) -> None:
    """Writes float32 [X, D]."""
    store = _create(folder, *vectors_XD.shape)
    store.write(vectors_XD).result()


def embed(passages: Sequence[Passage], encoder: Encoder, folder: pathlib.Path) -> None:
    """Encodes passages and writes float32 [X, D] in their order, with a progress bar."""
    store = _create(folder, len(passages), encoder.dimension)
    with tqdm.tqdm(total=len(passages), desc="embed", unit="passage", disable=None) as bar:
        for start in range(0, len(passages), BATCH):
            batch = passages[start : start + BATCH]
            store[start : start + len(batch)].write(encoder.encode_passages(batch)).result()
            bar.update(len(batch))


def read_vectors(folder: pathlib.Path) -> np.ndarray:
    """float32 [X, D] as written.

    Raises:
      UserError: there are no vectors, or they are damaged.
    """
    try:
        return tensorstore.open(_spec(folder), open=True).result().read().result()
    except ValueError as error:
        why = str(error).splitlines()[0][:200]
        raise UserError(f"{folder} has no readable vectors ({why}): rerun 'ragrl index'") from error
