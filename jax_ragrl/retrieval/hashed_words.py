"""A dense encoder without weights: hashed words, weighted by inverse document frequency.

Each word of the corpus adds sign(w) (1 + ln tf) idf(w) to one of D coordinates (the hashing trick,
Weinberger et al. 2009), so that inner products are unbiased estimates of the tf-idf cosine. All
arithmetic is float64, rounded to float32 at the end: the vectors are equal on every machine.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any
from zipfile import BadZipFile

import numpy as np

from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.kinds import HASHED_WORDS
from jax_ragrl.text.words import search_words
from jax_ragrl.types import Passage

FILE = "hashed.npz"


@functools.lru_cache(maxsize=1 << 18)
def hash_word(word: str) -> int:
    """Hashes a word to 63 bits: low bits select the coordinate, the highest the sign."""
    # Python's own hash differs between processes, and the shift keeps the result within int64.
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class HashedEncoder:
    """Encodes queries and passages as unit vectors of hashed words, weighted by a corpus."""

    def __init__(self, counts: dict[int, int], documents: int, dimension: int = 1024):
        if dimension < 1:
            raise UserError(f"dimension is {dimension}: it must be at least 1 (1024 is usual)")
        self.dimension = dimension
        self.documents = documents
        # Sorted, because the identity of an encoder must not depend on the order of the passages.
        self._counts = dict(sorted(counts.items()))
        # idf = ln((1 + N) / (1 + n)), which is 0 for a word of every passage.
        self._idf = {key: math.log((1 + documents) / (1 + n)) for key, n in self._counts.items()}

    @classmethod
    def fit(cls, passages: Sequence[Passage], dimension: int = 1024) -> HashedEncoder:
        """Counts the words of a corpus and returns its encoder."""
        counts: collections.Counter[int] = collections.Counter()
        for passage in passages:
            counts.update({hash_word(word) for word in search_words(passage_text(passage))})
        return cls(counts, len(passages), dimension)

    def _vector(self, text: str) -> np.ndarray:
        vector_D = np.zeros(self.dimension, np.float64)
        for word, times in collections.Counter(search_words(text)).items():
            key = hash_word(word)
            # Words that the corpus lacks get weight 0: no passage could match them.
            weight = (1.0 + math.log(times)) * self._idf.get(key, 0.0)
            vector_D[key % self.dimension] += weight if key >> 62 else -weight
        # An exact sum, because NumPy's order of summation depends on the processor.
        norm = math.sqrt(math.fsum((vector_D * vector_D).tolist()))
        return (vector_D / norm if norm else vector_D).astype(np.float32)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Returns float32 [Q, D] of norm 1, or 0 for a query without a word of the corpus."""
        return np.stack([self._vector(text) for text in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Returns float32 [X, D]: `encode_queries` of title and text."""
        return self.encode_queries([passage_text(passage) for passage in passages])

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            "key": np.fromiter(self._counts, np.int64),
            "count": np.fromiter(self._counts.values(), np.int64),
            "documents": np.array([self.documents]),
            "dimension": np.array([self.dimension]),
        }

    def describe(self) -> dict[str, Any]:
        """Returns the identity of the encoder for `index.json`."""
        digest = hashlib.sha256()
        for array in self._arrays().values():
            digest.update(array.astype("<i8").tobytes())
        weights = digest.hexdigest()[:16]
        return {"kind": HASHED_WORDS, "dimension": self.dimension, "weights": weights}

    def save(self, folder: pathlib.Path) -> None:
        """Writes the counts: they are integers, so that the weights are restored exactly."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = self._arrays()
        np.savez_compressed(folder / FILE, **arrays)

    @classmethod
    def load(cls, folder: pathlib.Path) -> HashedEncoder:
        """Reads the encoder that `save` wrote."""
        try:
            arrays = dict(np.load(folder / FILE))
            counts = dict(zip(arrays["key"].tolist(), arrays["count"].tolist(), strict=True))
            return cls(counts, int(arrays["documents"][0]), int(arrays["dimension"][0]))
        # Of a damaged archive, NumPy raises what its parts raise: zipfile, zlib, and itself.
        except (OSError, LookupError, ValueError, EOFError, BadZipFile, zlib.error) as error:
            raise UserError(
                f"{folder / FILE} cannot be read ({error}): rerun 'ragrl data index', or delete "
                "the folder if 'ragrl train' made it"
            ) from error
