"""Imports precomputed passage vectors; files are memory-mapped, not read."""

from __future__ import annotations

import pathlib
import tokenize

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.faiss_flat import read_faiss_flat

NUMPY = b"\x93NUMPY"


def open_vectors(path: pathlib.Path | str) -> np.ndarray:
    """Opens the vectors of a flat Faiss file, a `.npy` or a raw `.memmap` of float32 (FlashRAG).

    Returns:
      Floats [X, D]; of a `.memmap`, which has no shape, [X * D].

    Raises:
      UserError: another format, or a damaged file.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(NUMPY))
        # A `.memmap` has no header, so that only the file name identifies it.
        if path.suffix == ".memmap":
            return np.memmap(path, "<f4", "r")
        if start != NUMPY:
            return read_faiss_flat(path)[0]
        vectors = np.load(path, mmap_mode="r")
    except OSError as error:
        raise UserError(
            f"{path} cannot be opened ({error.strerror}): give a file of vectors"
        ) from error
    except (ValueError, tokenize.TokenError) as error:  # TokenError: a truncated header
        raise UserError(f"{path} is damaged ({error}): copy it again") from error
    if vectors.ndim != 2 or not np.issubdtype(vectors.dtype, np.floating):
        raise UserError(
            f"{path} holds {vectors.dtype} of shape {vectors.shape}: "
            "give one vector of floats per row"
        )
    return vectors
