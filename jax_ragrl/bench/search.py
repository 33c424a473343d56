"""What a search of many passages costs, and what it finds of the nearest.

Vectors are drawn of unit length, with a spectrum that falls as 1 / sqrt(i), so that some directions
tell more than others, as an encoder's do. Of repeated searches the fastest counts.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ragrl.bench.train import peak_bytes, timed
from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.dense import Searcher
from jax_ragrl.retrieval.embed import DTYPES
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.index import KINDS
from jax_ragrl.retrieval.scann import ScannSearcher

BLOCK = 1 << 17  # passages drawn at once


@dataclasses.dataclass(frozen=True)
class Search:
    """What is measured: the `k` nearest of `count` passages, for `queries` queries at once.

    `kind` and `dtype` are those of an index (`retrieval.index.build_index`).

    Raises `UserError` for others, for fewer passages than hits, and for a dtype of ScaNN's.
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
            raise UserError(f"--k {self.k} of --count {self.count}: ask for no more than there are")
        if self.kind == "scann" and self.dtype != "float32":
            raise UserError("ScaNN searches float32, whatever lies on the disk: leave --dtype out")

    def vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """float32 queries_QD, passages_XD."""
        rng = np.random.default_rng(0)
        passages_XD = np.empty((self.count, self.dimension), np.float32)
        for start in range(0, self.count, BLOCK):
            part_XD = passages_XD[start : start + BLOCK]
            part_XD[:] = _drawn(rng, *part_XD.shape)
        return _drawn(rng, self.queries, self.dimension), passages_XD


def _drawn(rng: np.random.Generator, count: int, dimension: int) -> np.ndarray:
    scale = 1 / np.sqrt(np.arange(1, dimension + 1, dtype=np.float32))
    drawn = rng.standard_normal((count, dimension), np.float32) * scale
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def found_share(found_QK: np.ndarray, expected_QK: np.ndarray) -> float:
    """The share of the expected that was found, over all queries."""
    pairs = zip(found_QK.tolist(), expected_QK.tolist(), strict=True)
    return sum(len(set(x) & set(y)) for x, y in pairs) / expected_QK.size


def bench_search(work: Search) -> dict[str, Any]:
    """Seconds of building, of a search and of the first one, which compiles; the recall of what an
    exact search of float32 vectors finds."""
    queries_QD, passages_XD = work.vectors()
    begun = time.perf_counter()
    searcher = _searcher(work, passages_XD)
    build_s = time.perf_counter() - begun
    search_s, first_s = timed(lambda: searcher.search(queries_QD, work.k), work.repeats)
    found_QK, peak = searcher.search(queries_QD, work.k)[1], peak_bytes()
    expected_QK = ExactSearcher(passages_XD).search(queries_QD, work.k)[1]
    return {
        "device": jax.devices()[0].device_kind if work.kind == "exact" else "host",
        **dataclasses.asdict(work),
        "build_s": round(build_s, 2),
        "search_s": round(search_s, 5),
        "first_s": round(first_s, 2),
        "queries_per_s": round(work.queries / search_s, 1),
        "recall": round(found_share(found_QK, expected_QK), 4),
        "vector_bytes": passages_XD.size * jnp.dtype(work.dtype).itemsize,
        "peak_bytes": peak,
    }


def _searcher(work: Search, passages_XD: np.ndarray) -> Searcher:
    if work.kind == "scann":
        return ScannSearcher.from_vectors(passages_XD)
    return ExactSearcher(passages_XD.astype(jnp.dtype(work.dtype), copy=False))
