"""Vectors of passages that were made elsewhere, mapped from their file: nothing is read yet."""

from __future__ import annotations

import pathlib
import tokenize

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.faiss_flat import read_faiss_flat

NUMPY = b"\x93NUMPY"


def open_vectors(path: pathlib.Path | str) -> np.ndarray:
    """The vectors of a flat Faiss file or a `.npy`, [X, D] of floats; or those of a raw `.memmap`
    of float32 (FlashRAG's), one after the other, [X * D].

    Raises:
      UserError: none of these, or damaged.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(NUMPY))
        if path.suffix == ".memmap":
            return np.memmap(path, "<f4", "r")
        if start != NUMPY:
            return read_faiss_flat(path)[0]
        vectors = np.load(path, mmap_mode="r")
    except OSError as error:
        told = f"{path} cannot be opened ({error.strerror}): give a file of vectors"
        raise UserError(told) from error
    except (ValueError, tokenize.TokenError) as error:  # the latter of a header cut short
        raise UserError(f"{path} is damaged ({error}): copy it again") from error
    if vectors.ndim != 2 or not np.issubdtype(vectors.dtype, np.floating):
        raise UserError(
            f"{path} holds {vectors.dtype} of shape {vectors.shape}: give a vector of floats a row"
        )
    return vectors
