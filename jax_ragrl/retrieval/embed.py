"""Passages to vectors: what an encoder is, and its vectors on disk as TensorStore shards."""

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

BATCH = 1024  # passages encoded at once: enough for an encoder to sort them by length
SHARD_BYTES = 1 << 26
DTYPES = ("float32", "bfloat16")  # of vectors: half the bytes, and recall as good as whole
PROGRESS = "progress.json"  # beside the shards, until the index is whole


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
    # A shard that is lost is an error, not zeros; so one of zeros must be there.
    whole = {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
    kvstore = {"driver": "file", "path": f"{folder.resolve()}/"}
    return {"driver": "zarr3", "kvstore": kvstore, **whole}


def _rows(dimension: int) -> int:
    """The rows of a shard: whole batches."""
    return max(1, SHARD_BYTES // (4 * dimension * BATCH)) * BATCH


def _shards(count: int, dimension: int) -> Iterator[slice]:
    """The rows of each shard. A shard that is written whole is not read first."""
    rows = _rows(dimension)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def _create(folder: pathlib.Path, shape: tuple[int, ...], dtype: str) -> tensorstore.TensorStore:
    """A new [count, dimension] store, sharded by rows; an older one is deleted."""
    (folder / PROGRESS).unlink(missing_ok=True)  # first: deleting the shards may be cut off
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
    """Writes [X, D] in a dtype of `DTYPES`; a shard at a time is in memory if they are mapped."""
    store = _create(folder, vectors_XD.shape, dtype)
    for shard in _shards(*vectors_XD.shape):
        _write(store, shard, vectors_XD[shard])


def embed(
    passages: Sequence[Passage],
    encoder: Encoder,
    folder: pathlib.Path,
    of: str,
    dtype: str = "float32",
) -> None:
    """Encodes passages and writes [X, D] in their order, with a progress bar.

    Goes on behind the last whole shard of a call that was killed, if `of`, what the vectors are of,
    was equal. `PROGRESS` in the folder keeps it until the caller takes it away.
    """
    count, done = len(passages), _done(folder, of)
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
            part.write_text(json.dumps({"of": of, "rows": shard.stop}), encoding="utf-8")
            os.replace(part, folder / PROGRESS)


def _done(folder: pathlib.Path, of: str) -> int:
    """How many rows an earlier call wrote."""
    try:
        made = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return made["rows"] if made["of"] == of else 0


@contextlib.contextmanager
def readable(folder: pathlib.Path) -> Iterator[tensorstore.TensorStore]:
    """The [X, D] of a folder; a slice is read when an array is made of it.

    Raises:
      UserError: there are no vectors, or what is read of them is damaged.
    """
    try:
        yield tensorstore.open(_spec(folder), open=True).result()
    except ValueError as error:
        why = str(error).splitlines()[0][:200]
        raise UserError(f"{folder} has no readable vectors ({why}): rerun 'ragrl index'") from error


def read_vectors(folder: pathlib.Path) -> np.ndarray:
    """All of them in memory, float32; errors as above."""
    with readable(folder) as store:
        return store.read().result().astype(np.float32, copy=False)
