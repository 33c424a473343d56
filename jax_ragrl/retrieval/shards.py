"""Arrays of one row per passage on disk, in shards: written one by one, memory-mapped afterwards.

The format is Zarr 3 without compression, so that a shard is the bytes of its rows and can be
mapped. TensorStore writes each shard under a temporary name and renames it.

zarr.json      shape, dtype and rows per shard
c/N/0          the rows of shard N; the last shard is padded to its full size
shards.json    identity of the whole, and the passages and SHA-256 of each shard
progress/      the same per shard, until the owner of the folder deletes it: a build that was killed
               resumes after the shards that it describes
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore

from jax_ragrl.errors import UserError
from jax_ragrl.runtime.jsonl import write_json

SHARD = 1024  # least passages per shard: minutes of a slow encoder on a CPU
MOST_SHARDS = 256  # so that an index of millions of passages opens fast
HEADER, RECORDS, PROGRESS = "zarr.json", "shards.json", "progress"
# The number of bytes that the first read compares with the records: all of a small array in less
# than a second, and a sample of a large one.
CHECKED_BYTES = 1 << 27
SAMPLED_ROWS = 4  # per shard


def rows_per_shard(count: int) -> int:
    """Returns the passages per shard, which depend on their number alone."""
    rows = SHARD
    while rows * MOST_SHARDS < count:
        rows *= 2
    return rows


def shards(count: int) -> list[slice]:
    """Returns the rows of each shard of `count` passages."""
    rows = rows_per_shard(count)
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def _file(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / "c" / str(number) / "0"


def _spec(folder: pathlib.Path) -> dict[str, Any]:
    # Shards of zeros are written too: a missing shard is an error.
    kvstore = {"driver": "file", "path": f"{folder.resolve()}/"}
    return {"driver": "zarr3", "kvstore": kvstore, "store_data_equal_to_fill_value": True}


class ShardWriter:
    """Writes shards of an array and records what each holds; several processes may write."""

    def __init__(self, folder: pathlib.Path, identity: str) -> None:
        """Opens an array that `create` has made, which returned the `identity`."""
        self.folder, self._identity = folder, identity
        self._store = tensorstore.open(_spec(folder)).result()

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [X, D]."""
        count, width = self._store.shape
        return count, width

    def missing(self, process: int = 0, processes: int = 1) -> list[int]:
        """Returns the numbers of those of every `processes`-th shard that are yet to be written."""
        numbers = range(process, len(shards(self.shape[0])), processes)
        return [n for n in numbers if not _is_whole(self.folder, n, self._identity)]

    def write(self, number: int, rows_SD: np.ndarray) -> None:
        """Writes a shard [S, D], cast to the dtype of the array, and then its record."""
        shard = shards(self.shape[0])[number]
        dtype = self._store.dtype.numpy_dtype
        self._store[shard].write(rows_SD.astype(dtype, copy=False)).result()
        record = {"passages": [shard.start, shard.stop], "sha256": _sha256(self.folder, number)}
        write_json(_record(self.folder, number), {"of": self._identity, **record})

    def finish(self) -> None:
        """Gathers the records of all shards in one file."""
        count = len(shards(self.shape[0]))
        records = [_read_json(_record(self.folder, number)) for number in range(count)]
        rows = [{name: x[name] for name in ("passages", "sha256")} for x in records]
        write_json(self.folder / RECORDS, {"of": self._identity, "shards": rows})


def create(folder: pathlib.Path, shape: tuple[int, int], dtype: str, identity: str) -> str:
    """Keeps the array [X, D] of an earlier call with whole shards of the identity, or creates one.

    An array of another identity is deleted. Returns the identity for `ShardWriter`, which also has
    shape, dtype and rows per shard.
    """
    identity = json.dumps([identity, rows_per_shard(shape[0]), dtype, list(shape)])
    numbers = range(len(shards(shape[0])))
    if not any(_is_whole(folder, number, identity) for number in numbers):
        _create(folder, shape, dtype)
    return identity


def _create(folder: pathlib.Path, shape: tuple[int, int], dtype: str) -> None:
    # Before the shards: a kill during their deletion must not leave records behind.
    forget_progress(folder)
    (folder / RECORDS).unlink(missing_ok=True)
    rows = min(shape[0], rows_per_shard(shape[0]))
    tensorstore.open(
        _spec(folder),
        create=True,
        delete_existing=True,
        dtype=tensorstore.dtype(dtype),
        shape=shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=[rows, shape[1]]),
    ).result()
    (folder / PROGRESS).mkdir()


def forget_progress(folder: pathlib.Path) -> None:
    """Deletes the records from which a killed build would resume."""
    shutil.rmtree(folder / PROGRESS, ignore_errors=True)


def _record(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / PROGRESS / f"{number:06d}.json"


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _sha256(folder: pathlib.Path, number: int) -> str:
    with _file(folder, number).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(folder: pathlib.Path, number: int, identity: str) -> bool:
    try:
        record = _read_json(_record(folder, number))
        return record["of"] == identity and record["sha256"] == _sha256(folder, number)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_array(rows_XD: np.ndarray, folder: pathlib.Path, dtype: str) -> None:
    """Writes an array [X, D] in place of an existing one, with the memory of one shard."""
    forget_progress(folder)
    count, width = rows_XD.shape
    writer = ShardWriter(folder, create(folder, (count, width), dtype, ""))
    for number, shard in enumerate(shards(count)):
        writer.write(number, np.asarray(rows_XD[shard]))
    writer.finish()
    forget_progress(folder)


class MappedArray:
    """An array [X, D] of a folder, memory-mapped: opening it reads no row.

    The first read compares shards with the SHA-256 of their records: as many as `CHECKED_BYTES`
    permits, and each one of whose sampled rows one is 0 or not finite.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Opens the array; raises `UserError` if the header or a shard is missing or damaged."""
        self._folder, self._lock, self._is_checked = folder, threading.Lock(), False
        try:
            self._read_header(_read_json(folder / HEADER))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(folder, f"{HEADER}: {type(error).__name__}: {error}") from error
        numbers = range(-(-self.shape[0] // self.shard_rows))
        self._shards = [self._map(number) for number in numbers]
        # Now, because an update may delete the files before the first read.
        self._hashes = _recorded_hashes(folder, len(self._shards))

    def _read_header(self, header: dict[str, Any]) -> None:
        codecs = [codec["name"] for codec in header["codecs"]]
        if codecs != ["bytes"]:
            raise ValueError(f"codecs {codecs}, not plain bytes")
        count, width = header["shape"]
        self.shape = (int(count), int(width))
        self.dtype = np.dtype(jnp.dtype(header["data_type"]))
        self.shard_rows = int(header["chunk_grid"]["configuration"]["chunk_shape"][0])

    def _map(self, number: int) -> np.ndarray:
        # All shards at once, so that an index stays readable when an update deletes its files.
        file, shape = _file(self._folder, number), (self.shard_rows, self.shape[1])
        size = self.shard_rows * self.shape[1] * self.dtype.itemsize
        try:
            actual = file.stat().st_size
        except OSError as error:
            raise _unreadable(self._folder, f"shard {number} is missing") from error
        if actual != size:
            why = f"shard {number} has {actual} bytes instead of {size}"
            raise _unreadable(self._folder, why)
        # A plain array, because each slice of a `np.memmap` creates an object of that subclass.
        return np.asarray(np.memmap(file, self.dtype, "r", shape=shape))

    def _check(self) -> None:
        """Raises `UserError` if a shard that is compared has other bytes than were written."""
        with self._lock:  # several threads search, and one of them checks
            if self._is_checked:
                return
            total = sum(shard.nbytes for shard in self._shards)
            every = max(1, -(-total // CHECKED_BYTES))
            for number in range(len(self._hashes)):
                if number % every == 0 or self._is_suspicious(number):
                    self._compare(number)
            self._is_checked = True

    def _is_suspicious(self, number: int) -> bool:
        """Whether a sampled row of a shard is 0 or not finite."""
        count = min(self.shard_rows, self.shape[0] - number * self.shard_rows)
        sample = np.linspace(0, count - 1, SAMPLED_ROWS).astype(np.int32)
        rows_SD = self._shards[number][sample].astype(np.float32)
        return not (np.isfinite(rows_SD).all() and rows_SD.any(axis=1).all())

    def _compare(self, number: int) -> None:
        content = self._shards[number].view(np.uint8).data
        if hashlib.sha256(content).hexdigest() != self._hashes[number]:
            raise UserError(
                f"{_file(self._folder, number)} is damaged (it has other bytes than were written): "
                "rerun 'ragrl data index', or delete the folder of the index if 'ragrl train' made "
                "it"
            )

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Reads consecutive rows into memory; raises `UserError` if the array is damaged."""
        self._check()
        start, stop, _ = rows.indices(self.shape[0])
        result = np.empty((max(0, stop - start), self.shape[1]), self.dtype)
        for number, inside, at in self._pieces(start, stop):
            result[at] = self._shards[number][inside]
        return result

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        row = start
        while row < stop:
            number, first = divmod(row, self.shard_rows)
            length = min(self.shard_rows - first, stop - row)
            yield number, slice(first, first + length), slice(row - start, row - start + length)
            row += length

    def take(self, index: np.ndarray) -> np.ndarray:
        """Reads rows [..., D] of an index int [...], from 0 to X - 1; errors as for a slice."""
        self._check()
        flat = index.reshape(-1)
        result = np.empty((len(flat), self.shape[1]), self.dtype)
        numbers = flat // self.shard_rows
        for number in np.unique(numbers).tolist():
            at = numbers == number
            result[at] = self._shards[number][flat[at] % self.shard_rows]
        return result.reshape(*index.shape, self.shape[1])


def _recorded_hashes(folder: pathlib.Path, count: int) -> list[str]:
    """Empty without a file of records, which a user may delete to leave out the check."""
    file = folder / RECORDS
    try:
        hashes = [str(record["sha256"]) for record in _read_json(file)["shards"]]
        if len(hashes) != count:
            raise ValueError(f"{len(hashes)} records for {count} shards")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}: {error}): rerun 'ragrl data index', or "
            "delete the file to leave out the check of the vectors"
        ) from error
    return hashes


def _unreadable(folder: pathlib.Path, why: str) -> UserError:
    return UserError(f"{folder} has no readable vectors ({why}): rerun 'ragrl data index'")


def read_array(folder: pathlib.Path) -> np.ndarray:
    """Reads the whole array of a folder into memory as float32; errors as `MappedArray`."""
    array = MappedArray(folder)
    return array[:].astype(np.float32, copy=False)
