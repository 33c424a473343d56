"""Measures ScaNN, as this library calls it, against FAISS at equal recall of the ten nearest.

    pip install faiss-cpu && python docs/lab/against_faiss.py

Vectors have clusters, as embeddings of passages have: about one center per `CLUSTER` vectors, with
sizes that follow a power law, and a spread of the same length around each center. The standard
deviation of a dimension falls as 1 / sqrt(i). Queries are drawn as the passages are. Each library
is tuned on one half of the queries, to its cheapest setting that reaches the recall, and measured
on the other half.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from search import direction_scale, recall_of

from jax_ragrl.retrieval.dense import Searcher
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.scann import BRUTE_FORCE, ScannSearcher, Setting, count_leaves
from jax_ragrl.retrieval.tune import cheapest

K = 10
TARGETS = (0.95, 0.99)
CLUSTER = 100  # vectors per cluster, on average
BLOCK = 1 << 16  # vectors sampled at once, to bound temporary memory
HNSW_LINKS, HNSW_EFFORT = 32, 100  # per vector; of the construction
LISTS = 4  # times the square root of the vectors, as FAISS's guide says (4 to 16)
GROWTH = 1.25  # of the ladders of FAISS's settings

Search = Callable[[np.ndarray], np.ndarray]  # queries [Q, D] to the indices of hits [Q, K]


@dataclasses.dataclass(frozen=True)
class FaissWork:
    """The measured work.

    Fields:
      count: number of passages.
      dimension: dimension of a vector.
      queries: number of queries; one half tunes, the other is measured, in one call.
      repeats: number of timed searches; the fastest counts.
    """

    count: int = 200_000
    dimension: int = 384
    queries: int = 2000
    repeats: int = 3

    def vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns float32 `queries_QD` and `passages_XD` of unit length, from a fixed seed."""
        rng = np.random.default_rng(0)
        clusters = max(1, self.count // CLUSTER)
        centers_CD = rng.standard_normal((clusters, self.dimension), np.float32)
        share_C = 1 / np.sqrt(np.arange(1, clusters + 1))
        draw = functools.partial(_draw, rng, centers_CD, share_C / share_C.sum())
        starts = range(0, self.count, BLOCK)
        parts = [draw(min(BLOCK, self.count - start)) for start in starts]
        return draw(self.queries), np.concatenate(parts)


def _draw(
    rng: np.random.Generator, centers_CD: np.ndarray, share_C: np.ndarray, count: int
) -> np.ndarray:
    clusters, dimension = centers_CD.shape
    noise_XD = rng.standard_normal((count, dimension), np.float32)
    vectors_XD = centers_CD[rng.choice(clusters, size=count, p=share_C)] + noise_XD
    vectors_XD *= direction_scale(dimension)
    return vectors_XD / np.linalg.norm(vectors_XD, axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Queries whose nearest passages are known, in two halves."""

    tune_QD: np.ndarray
    tune_QK: np.ndarray
    test_QD: np.ndarray
    test_QK: np.ndarray
    repeats: int

    def recall(self, search: Search) -> float:
        """Returns the recall on the half that tunes."""
        return recall_of(search(self.tune_QD), self.tune_QK)

    def seconds(self, search: Search) -> float:
        """Returns the seconds of the fastest search for the half that tunes."""
        return self._time(search, self.tune_QD)

    def _time(self, search: Search, queries_QD: np.ndarray) -> float:
        def once() -> float:
            start = time.perf_counter()
            search(queries_QD)
            return time.perf_counter() - start

        return min(once() for _ in range(self.repeats))

    def measure(self, search: Search) -> dict[str, float]:
        """Returns the recall and the speed on the other half."""
        speed = len(self.test_QD) / self._time(search, self.test_QD)
        recall = recall_of(search(self.test_QD), self.test_QK)
        return {"recall": round(recall, 4), "queries_per_s": round(speed, 1)}


def bench_faiss(work: FaissWork) -> dict[str, Any]:
    """Measures ScaNN, and FAISS's IVFFlat and HNSWFlat, at the recalls of `TARGETS`.

    Returns:
      The work, and per library `build_s`, fixed `settings` and a list `at`: per target the
      `target`, the `setting` chosen, and `recall` and `queries_per_s` of the half that is measured.
    """
    import faiss

    queries_QD, passages_XD = work.vectors()
    truth_QK = ExactSearcher(passages_XD).search(queries_QD, K)[1]
    half = work.queries // 2
    trial = Trial(
        queries_QD[:half], truth_QK[:half], queries_QD[half:], truth_QK[half:], work.repeats
    )
    return {
        "device": "host",
        "cores": os.cpu_count(),
        **dataclasses.asdict(work),
        "k": K,
        "versions": {"faiss": faiss.__version__, "scann": importlib.metadata.version("scann")},
        **_measure_all(faiss, passages_XD, trial),
    }


def _measure_all(faiss: Any, passages_XD: np.ndarray, trial: Trial) -> dict[str, Any]:
    measures = {
        "scann": functools.partial(_measure_scann, passages_XD, trial),
        "faiss_ivf_flat": functools.partial(_measure_ivf, faiss, passages_XD, trial),
        "faiss_hnsw_flat": functools.partial(_measure_hnsw, faiss, passages_XD, trial),
    }
    results = {}
    for name, measure in measures.items():
        results[name] = measure()
        # Each library takes minutes: a measurement that is stopped has shown the first ones.
        print(f"{name} {json.dumps(results[name])}", file=sys.stderr)
    return results


def _hits(searcher: Searcher) -> Search:
    return lambda queries_QD: searcher.search(queries_QD, K)[1]


def _measure_scann(passages_XD: np.ndarray, trial: Trial) -> dict[str, Any]:
    start = time.perf_counter()
    searcher = ScannSearcher.from_vectors(passages_XD)
    build_s = round(time.perf_counter() - start, 2)
    if len(passages_XD) < BRUTE_FORCE:
        rows = [{"target": t, "setting": {}, **trial.measure(_hits(searcher))} for t in TARGETS]
        return {"build_s": build_s, "settings": {"brute_force": True}, "at": rows}
    leaves = count_leaves(len(passages_XD))

    @functools.cache
    def recall(setting: Setting) -> float:
        return trial.recall(_hits(searcher.at(setting)))

    @functools.cache
    def seconds(setting: Setting) -> float:
        return trial.seconds(_hits(searcher.at(setting)))

    def row(target: float) -> dict[str, Any]:
        best = cheapest(recall, seconds, target, leaves)
        result = trial.measure(_hits(searcher.at(best)))
        return {"target": target, "setting": best._asdict(), **result}

    rows = [row(target) for target in TARGETS]
    return {"build_s": build_s, "settings": {"num_leaves": leaves}, "at": rows}


def _measure_ivf(faiss: Any, passages_XD: np.ndarray, trial: Trial) -> dict[str, Any]:
    count, dimension = passages_XD.shape
    # FAISS wants 39 vectors per list to train.
    lists = max(1, min(round(LISTS * math.sqrt(count)), count // 39))
    start = time.perf_counter()
    quantizer = faiss.IndexFlatIP(dimension)
    index = faiss.IndexIVFFlat(quantizer, dimension, lists, faiss.METRIC_INNER_PRODUCT)
    index.train(passages_XD)
    index.add(passages_XD)
    build_s = time.perf_counter() - start

    def search(probes: int, queries_QD: np.ndarray) -> np.ndarray:
        index.nprobe = probes
        hits_QK: np.ndarray = index.search(queries_QD, K)[1]
        return hits_QK

    return _one_dial(search, "nprobe", lists, trial, build_s) | {"settings": {"nlist": lists}}


def _measure_hnsw(faiss: Any, passages_XD: np.ndarray, trial: Trial) -> dict[str, Any]:
    count, dimension = passages_XD.shape
    start = time.perf_counter()
    index = faiss.IndexHNSWFlat(dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_EFFORT
    index.add(passages_XD)
    build_s = time.perf_counter() - start

    def search(effort: int, queries_QD: np.ndarray) -> np.ndarray:
        index.hnsw.efSearch = effort
        hits_QK: np.ndarray = index.search(queries_QD, K)[1]
        return hits_QK

    settings = {"M": HNSW_LINKS, "efConstruction": HNSW_EFFORT}
    most = min(count, 4096)
    return _one_dial(search, "efSearch", most, trial, build_s) | {"settings": settings}


def _one_dial(
    search: Callable[[int, np.ndarray], np.ndarray],
    name: str,
    most: int,
    trial: Trial,
    build_s: float,
) -> dict[str, Any]:
    """Measures an index whose recall and time rise with one number.

    Args:
      search: hits of queries for a number.
      name: of the number.
      most: its largest value.
      trial: the queries.
      build_s: seconds of building.
    """

    def row(target: float) -> dict[str, Any]:
        value = 1
        while value < most and trial.recall(functools.partial(search, value)) < target:
            value = min(most, max(value + 1, round(value * GROWTH)))
        result = trial.measure(functools.partial(search, value))
        return {"target": target, "setting": {name: value}, **result}

    return {"build_s": round(build_s, 2), "at": [row(target) for target in TARGETS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(FaissWork):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    print(json.dumps(bench_faiss(FaissWork(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
