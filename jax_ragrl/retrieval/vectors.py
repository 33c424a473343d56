"""Imports precomputed passage vectors; files are memory-mapped, not read."""

from __future__ import annotations

import pathlib
import struct
import tokenize

import numpy as np

from jax_ragrl.errors import UserError

NUMPY = b"\x93NUMPY"
# Of Faiss's `IndexFlat`, little-endian without alignment: a code of four letters, int32 dimension,
# int64 count, two unused int64, uint8 trained, int32 metric, and uint64 number of floats. The
# float32 vectors follow row by row.
HEADER = struct.Struct("<4siqqqBiQ")
METRICS = {b"IxFI": 0, b"IxF2": 1}  # inner product, squared distance


def open_vectors(path: pathlib.Path | str) -> np.ndarray:
    """Opens the vectors of a flat Faiss file, a `.npy` or a raw `.memmap` of float32 (FlashRAG).

    Returns floats [X, D]; of a `.memmap`, which has no shape, [X * D].

    Raises:
      UserError: another format, or a damaged file.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(HEADER.size)
        # A `.memmap` has no header, so that only the file name identifies it.
        if path.suffix == ".memmap":
            return np.memmap(path, "<f4", "r")
        if not start.startswith(NUMPY):
            return np.memmap(path, "<f4", "r", HEADER.size, _faiss_shape(path, start))
        vectors = np.load(path, mmap_mode="r")
    except OSError as error:
        raise UserError(
            f"{path} cannot be opened ({error.strerror}): give a file of vectors"
        ) from error
    except (ValueError, tokenize.TokenError) as error:  # TokenError: a truncated header
        raise UserError(
            f"{path} is damaged, or no array of numbers ({error}): copy it again, or save one "
            "vector of floats per row"
        ) from error
    if vectors.ndim != 2 or not np.issubdtype(vectors.dtype, np.floating):
        raise UserError(
            f"{path} holds {vectors.dtype} of shape {vectors.shape}: "
            "give one vector of floats per row"
        )
    return vectors


def _faiss_shape(path: pathlib.Path, start: bytes) -> tuple[int, int]:
    """Returns [X, D] of a Faiss file, whose header must agree with its size."""
    if start[:4] not in METRICS:
        raise UserError(
            f"{path} starts with {start[:4]!r}, not with a flat Faiss index (IxFI, IxF2): "
            "export the vectors with IndexFlat, or rerun 'ragrl data index' on the corpus"
        )
    if len(start) < HEADER.size:
        raise UserError(f"{path} ends within its header: copy it again")
    code, dimension, count, _, _, _, metric, floats = HEADER.unpack(start)
    size = HEADER.size + 4 * floats
    consistent = dimension > 0 and count > 0 and floats == count * dimension
    if not consistent or metric != METRICS[code] or path.stat().st_size != size:
        raise UserError(
            f"{path} is damaged: its header says {count} x {dimension} vectors, metric {metric} "
            f"and {size} bytes, the file has {path.stat().st_size}: copy it again"
        )
    return count, dimension
