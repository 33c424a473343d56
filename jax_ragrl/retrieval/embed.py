"""The interface of an encoder, and passage vectors on disk as TensorStore shards."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorstore
import tqdm

from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage

BATCH = 1024  # passages per call: enough for an encoder to sort them by length
SHARD_BYTES = 1 << 26  # of float32: large enough to write fast, small enough to redo after a kill
DTYPES = ("float32", "bfloat16")  # of vectors: bfloat16 halves the bytes at about equal recall
PROGRESS = "progress.json"  # in the vectors' folder until the index is complete


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


def _spec(folder: pathlib.Path) -> dict[str, Any]:
    # A missing shard must be an error and not zeros; therefore shards of zeros are written too.
    strict = {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
    kvstore = {"driver": "file", "path": f"{folder.resolve()}/"}
    return {"driver": "zarr3", "kvstore": kvstore, **strict}


def _rows(dimension: int) -> int:
    """Returns the number of rows per shard, a multiple of `BATCH`."""
    return max(1, SHARD_BYTES // (4 * dimension * BATCH)) * BATCH


def _shards(count: int, dimension: int) -> Iterator[slice]:
    """Yields the rows of each shard. A complete shard is written without reading the old one."""
    rows = _rows(dimension)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def _create(folder: pathlib.Path, shape: tuple[int, ...], dtype: str) -> tensorstore.TensorStore:
    """Creates a [count, dimension] store, sharded by rows; deletes an existing one."""
    # Before the shards: a kill during their deletion must not leave a progress file behind.
    (folder / PROGRESS).unlink(missing_ok=True)
    count, dimension = shape
    layout = tensorstore.ChunkLayout(chunk_shape=[min(count, _rows(dimension)), dimension])
    return tensorstore.open(
        _spec(folder),
        create=True,
        delete_existing=True,
        dtype=tensorstore.dtype(dtype),
        shape=shape,
        chunk_layout=layout,
    ).result()


def _write(store: tensorstore.TensorStore, shard: slice, vectors_XD: np.ndarray) -> None:
    store[shard].write(vectors_XD.astype(store.dtype.numpy_dtype, copy=False)).result()


def write_vectors(vectors_XD: np.ndarray, folder: pathlib.Path, dtype: str = "float32") -> None:
    """Writes vectors shard by shard, so that memory-mapped vectors need the memory of one shard.

    Args:
      vectors_XD: floats [X, D].
      folder: of the store; an existing one is replaced.
      dtype: a name in `DTYPES`.
    """
    store = _create(folder, vectors_XD.shape, dtype)
    for shard in _shards(*vectors_XD.shape):
        _write(store, shard, vectors_XD[shard])


def embed(
    passages: Sequence[Passage],
    encoder: Encoder,
    folder: pathlib.Path,
    identity: str,
    dtype: str = "float32",
) -> None:
    """Encodes passages and writes [X, D] in their order, with a progress bar.

    A call that was killed is resumed after its last complete shard if the identity is equal. The
    file `PROGRESS` in the folder stores it until the caller deletes it.

    Args:
      passages: in the order of the corpus.
      encoder: the passage encoder.
      folder: of the store.
      identity: names corpus, encoder and dtype; equal identities mean equal vectors.
      dtype: a name in `DTYPES`.
    """
    count, done = len(passages), _rows_written(folder, identity)
    shape = (count, encoder.dimension)
    store = tensorstore.open(_spec(folder)).result() if done else _create(folder, shape, dtype)
    bar = tqdm.tqdm(total=count, initial=done, desc="embed", unit="passage", disable=None)
    with bar:
        for shard in _shards(*shape):
            if shard.stop <= done:
                continue
            vectors = []
            for start in range(shard.start, shard.stop, BATCH):
                vectors.append(encoder.encode_passages(passages[start : start + BATCH]))
                bar.update(len(vectors[-1]))
            _write(store, shard, np.concatenate(vectors))
            part = folder / f"{PROGRESS}.part"
            part.write_text(json.dumps({"of": identity, "rows": shard.stop}), encoding="utf-8")
            os.replace(part, folder / PROGRESS)  # atomic: the file is never half written


def _rows_written(folder: pathlib.Path, identity: str) -> int:
    """Returns the number of rows that an earlier call wrote for the same identity."""
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return progress["rows"] if progress["of"] == identity else 0


@contextlib.contextmanager
def readable(folder: pathlib.Path) -> Iterator[tensorstore.TensorStore]:
    """Opens the vectors [X, D] of a folder lazily; converting a slice to an array reads it.

    Raises:
      UserError: there are no vectors, or a shard that is read is damaged.
    """
    try:
        yield tensorstore.open(_spec(folder), open=True).result()
    except ValueError as error:
        why = str(error).splitlines()[0][:200]
        raise UserError(f"{folder} has no readable vectors ({why}): rerun 'ragrl index'") from error


def read_vectors(folder: pathlib.Path) -> np.ndarray:
    """Reads all vectors of a folder into memory as float32; errors as `readable`."""
    with readable(folder) as store:
        return store.read().result().astype(np.float32, copy=False)
