"""Reads vectors from a Faiss `IndexFlat` file without Faiss.

Layout, little-endian: a four-letter code (`IxFI` inner product, `IxF2` squared distance), int32
dimension, int64 count, two unused int64, uint8 trained, int32 metric, uint64
number of floats, then the float32 vectors row by row.
"""

from __future__ import annotations

import pathlib
import struct

import numpy as np

from jax_ragrl.errors import UserError

# "<": little-endian without alignment, as Faiss writes the fields.
HEADER = struct.Struct("<4siqqqBiQ")
METRICS = {b"IxFI": ("inner_product", 0), b"IxF2": ("squared_l2", 1)}


def _header(path: pathlib.Path) -> tuple[int, int, str]:
    """Returns (count, dimension, metric) from a header that agrees with the file's size."""
    try:
        with path.open("rb") as file:
            start = file.read(HEADER.size)
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}): give a Faiss file") from error
    if start[:4] not in METRICS:
        raise UserError(
            f"{path} starts with {start[:4]!r}, not with a flat Faiss index (IxFI, IxF2): "
            "export the vectors with IndexFlat, or rerun 'ragrl data index' on the corpus"
        )
    if len(start) < HEADER.size:
        raise UserError(f"{path} ends within its header: copy it again")
    code, dimension, count, _, _, _, metric, floats = HEADER.unpack(start)
    name, number = METRICS[code]
    size = HEADER.size + 4 * floats
    # Redundant fields of the header and the file size reveal a truncated or foreign file.
    consistent = dimension > 0 and count > 0 and floats == count * dimension and metric == number
    if not consistent or path.stat().st_size != size:
        raise UserError(
            f"{path} is damaged: its header says {count} x {dimension} vectors, metric {metric} "
            f"and {size} bytes, the file has {path.stat().st_size}: copy it again"
        )
    return count, dimension, name


def read_faiss_flat(path: pathlib.Path | str) -> tuple[np.ndarray, str]:
    """Returns the vectors float32 [X, D], memory-mapped and read-only, and the metric.

    The metric is `inner_product` or `squared_l2`. Unit vectors have the same order under both.

    Raises:
      UserError: not a flat index, or a header that contradicts itself or the file's size.
    """
    path = pathlib.Path(path)
    count, dimension, metric = _header(path)
    vectors = np.memmap(path, dtype="<f4", mode="r", offset=HEADER.size, shape=(count, dimension))
    return vectors, metric
