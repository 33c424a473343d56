"""Reads and writes safetensors files one tensor at a time; no whole file is in memory.

Format: eight bytes with the length of the header, a JSON header, then the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BLOCKS, BLOCK = 64, 1 << 16  # of a file, and bytes per block, that a checksum reads
_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Entry(NamedTuple):
    """A tensor to be written; `fetch` returns its value, and is called once, when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def write_file(path: Path, entries: Sequence[Entry]) -> None:
    """Writes one safetensors file; at most one tensor is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for e in entries:
        if e.dtype not in _DTYPE_NAMES:
            raise UserError(f"cannot save {e.name} as {e.dtype}: use one of {list(_DTYPE_NAMES)}")
        span = [offset, offset + e.nbytes]
        header[e.name] = {
            "dtype": _DTYPE_NAMES[e.dtype],
            "shape": list(e.shape),
            "data_offsets": span,
        }
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for e in entries:
            with np.errstate(over="ignore"):
                value: np.ndarray = np.ascontiguousarray(e.fetch(), dtype=jnp.dtype(e.dtype))
            if not np.isfinite(value).all():
                raise UserError(
                    f"{e.name} has values that {e.dtype} cannot hold (too large, or not finite): "
                    "use bfloat16 or float32, or weights from before training diverged"
                )
            if value.shape != e.shape:
                raise ValueError(f"{e.name}: fetched {value.shape}, but the header says {e.shape}")
            f.write(value.reshape(-1).view(np.uint8).data)


def write_shards(folder: Path, entries: Sequence[Entry], max_shard_bytes: int) -> None:
    """Writes `model.safetensors`, or several shards and an index if one would be too large."""
    shards: list[list[Entry]] = [[]]
    for e in entries:
        if shards[-1] and sum(x.nbytes for x in [*shards[-1], e]) > max_shard_bytes:
            shards.append([])
        shards[-1].append(e)
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard)
    index = {
        "metadata": {"total_size": sum(e.nbytes for e in entries)},
        "weight_map": {e.name: n for n, s in zip(names, shards, strict=True) for e in s},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def locate(folder: Path) -> dict[str, Path]:
    """The file of every tensor of a checkpoint folder; `UserError` if a file is missing."""
    # First, as in Transformers: beside a file that was copied into the folder, an index is stale.
    if (folder / SINGLE).is_file():
        return {name: folder / SINGLE for name in shapes_of(folder / SINGLE)}
    if (folder / INDEX).is_file():
        weight_map = weight_map_of(folder / INDEX)
        if missing := sorted({f for f in weight_map.values() if not (folder / f).is_file()}):
            raise UserError(
                f"{folder} lacks {missing[0]}, one of {len(missing)} files its index names: "
                "download or copy it again"
            )
        return {name: folder / f for name, f in weight_map.items()}
    raise UserError(
        f"{folder} has neither {SINGLE} nor {INDEX}: give a folder in safetensors format "
        "(convert a pytorch_model.bin with Transformers' save_pretrained)"
    )


def weights_checksum(folder: Path) -> str:
    """A checksum of blocks from all parts of a checkpoint folder; training changes every part."""
    crc = 0
    for file in sorted({*locate(folder).values()}):
        size = file.stat().st_size
        with file.open("rb") as data:
            for start in range(0, size, max(BLOCK, size // BLOCKS)):
                data.seek(start)
                crc = zlib.crc32(data.read(BLOCK), crc)
    return f"{crc:08x}"


def weight_map_of(index: Path) -> dict[str, str]:
    """The file of each tensor by an index of shards; `UserError` if the index is damaged."""
    files = read_object(index, "copy it again").get("weight_map")
    # The files are beside the index: a path could leave the folder, and no file name is longer.
    if not isinstance(files, dict) or not all(
        isinstance(file, str) and Path(file).name == file and len(file.encode()) < 256
        for file in files.values()
    ):
        raise UserError(f"{index} is damaged (it has no weight_map of file names): copy it again")
    return files


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by name, from a file's header; no tensor is read."""
    with _open(path) as f:
        return {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118


def read(path: Path, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of one tensor of weights, in its stored dtype.

    The file is opened for each read: with a mapping that stays open, every page that was ever read
    would count as memory of this process. `UserError` if the file lacks the tensor, or it holds
    integers, floats that NumPy has not, NaN or infinities.
    """
    with _open(path) as f:
        try:
            values: np.ndarray = f.get_slice(name)[index]
        except (SafetensorError, AttributeError) as e:  # the latter for floats of eight bits
            raise UserError(
                f"{path}: {name} cannot be read ({e}): copy it again, or convert it to bfloat16"
            ) from e
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise UserError(f"{path}: {name} holds {values.dtype}, not floats: copy it again")
    # One pass: the sum of finite weights is finite, and NaN and infinity remain in every sum.
    with np.errstate(invalid="ignore"):
        total = np.sum(values, dtype=np.float32)
    if not np.isfinite(total):
        raise UserError(f"{path}: {name} holds NaN or infinity: copy it again")
    return values


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} is not a whole safetensors file ({e}): copy it again") from e
