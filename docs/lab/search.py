"""Measures the search for the nearest of many passages: time and recall.

    python docs/lab/search.py [--kind scann] [--dtype int8] [--count 2000000]

Vectors are random with unit length and a spectrum that falls as 1 / sqrt(i), because the directions
of real embeddings differ in variance, too. The result is the fastest of the repeated searches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ragrl.bench.train import peak_bytes, time_step
from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.dense import Searcher
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.int8 import Int8Searcher, quantize
from jax_ragrl.retrieval.kinds import DTYPES, INT8, KINDS
from jax_ragrl.retrieval.scann import ScannSearcher

BLOCK = 1 << 17  # passages sampled at once, to bound temporary memory


@dataclasses.dataclass(frozen=True)
class SearchWork:
    """The measured work: the `k` nearest of `count` passages for `queries` queries at once.

    Fields:
      kind: kind of search, see `retrieval.index.build_index`.
      dtype: dtype of the vectors; only an exact index has a choice.
      count: number of passages.
      dimension: dimension of a vector.
      queries: queries per search.
      k: hits per query.
      repeats: number of timed searches.
    """

    kind: str = "exact"
    dtype: str = "float32"
    count: int = 100_000
    dimension: int = 768
    queries: int = 256
    k: int = 10
    repeats: int = 3

    def __post_init__(self) -> None:
        one_of("--kind", self.kind, KINDS)
        one_of("--dtype", self.dtype, DTYPES)
        if self.k > self.count:
            raise UserError(f"--k is {self.k} of {self.count} passages: give a smaller one")
        if self.kind == "scann" and self.dtype != "float32":
            raise UserError("ScaNN searches float32 only: leave --dtype out")

    def vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns float32 `queries_QD` and `passages_XD`."""
        # A fixed seed, so that all kinds of search have the same work.
        rng = np.random.default_rng(0)
        passages_XD = np.empty((self.count, self.dimension), np.float32)
        for start in range(0, self.count, BLOCK):
            block_XD = passages_XD[start : start + BLOCK]
            block_XD[:] = _random_vectors(rng, *block_XD.shape)
        return _random_vectors(rng, self.queries, self.dimension), passages_XD


def direction_scale(dimension: int) -> np.ndarray:
    """Returns the standard deviation per dimension, float32 [D]."""
    scale_D: np.ndarray = 1 / np.sqrt(np.arange(1, dimension + 1, dtype=np.float32))
    return scale_D


def _random_vectors(rng: np.random.Generator, count: int, dimension: int) -> np.ndarray:
    vectors_XD = rng.standard_normal((count, dimension), np.float32) * direction_scale(dimension)
    return vectors_XD / np.linalg.norm(vectors_XD, axis=1, keepdims=True)


def recall_of(hits_QK: np.ndarray, expected_QK: np.ndarray) -> float:
    """The share of the expected passages among the hits, over all queries."""
    pairs = zip(hits_QK.tolist(), expected_QK.tolist(), strict=True)
    return sum(len(set(x) & set(y)) for x, y in pairs) / expected_QK.size


def bench_search(work: SearchWork) -> dict[str, Any]:
    """Measures building and searching, and the first search, which compiles.

    The recall is relative to the hits of an exact search of float32 vectors.
    """
    queries_QD, passages_XD = work.vectors()
    start = time.perf_counter()
    searcher = _searcher(work, passages_XD)
    build_s = time.perf_counter() - start
    search_s, first_s, _ = time_step(lambda: searcher.search(queries_QD, work.k), work.repeats)
    # The peak is read before the reference search, which must not count.
    hits_QK, peak = searcher.search(queries_QD, work.k)[1], peak_bytes()
    # float32 even for bfloat16 vectors: the recall then includes the loss of their rounding.
    expected_QK = ExactSearcher(passages_XD).search(queries_QD, work.k)[1]
    return {
        "device": jax.devices()[0].device_kind if work.kind == "exact" else "host",
        **dataclasses.asdict(work),
        "build_s": round(build_s, 2),
        "search_s": round(search_s, 5),
        "first_s": round(first_s, 2),
        "queries_per_s": round(work.queries / search_s, 1),
        "recall": round(recall_of(hits_QK, expected_QK), 4),
        "vector_bytes": passages_XD.size * jnp.dtype(work.dtype).itemsize,
        "peak_bytes": peak,
    }


def _searcher(work: SearchWork, passages_XD: np.ndarray) -> Searcher:
    if work.kind == "scann":
        # In memory: reading a searcher from disk is not part of the measurement.
        return ScannSearcher.from_vectors(passages_XD)
    if work.dtype == INT8:
        return Int8Searcher(*quantize(passages_XD), lambda index: passages_XD[index])
    return ExactSearcher(passages_XD.astype(jnp.dtype(work.dtype), copy=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(SearchWork):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    print(json.dumps(bench_search(SearchWork(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
