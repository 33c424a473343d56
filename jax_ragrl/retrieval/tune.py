"""Tunes a ScaNN searcher: the cheapest setting that reaches a recall of the ten nearest.

Sampled passages are the queries, each without itself among its hits. Questions lie farther from the
passages than passages from each other, so that their recall may be lower.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_ragrl.retrieval.exact import GRID
from jax_ragrl.retrieval.scann import BRUTE_FORCE, NEIGHBORS, ScannSearcher, Setting, count_leaves

K = 10
SAMPLE = 500  # passages that serve as queries
CANDIDATE_RUNGS = (64, 32, 16, 8, 4, 2, 1)
FIRST_LEAVES, GROWTH = 4, 1.25  # of the ladder of leaves
BLOCK = 1 << 15  # passages scored at once, to bound temporary memory

Measure = Callable[[Setting], float]


def leaf_rungs(leaves: int) -> list[int]:
    rungs = [min(FIRST_LEAVES, leaves)]
    while rungs[-1] < leaves:
        rungs.append(min(leaves, round(rungs[-1] * GROWTH)))
    return rungs


def cheapest(recall: Measure, cost: Measure, target: float, leaves: int) -> Setting:
    """Returns the cheapest setting whose recall reaches the target; the most thorough if none does.

    Both measures must rise with the leaves and with the candidates.
    """
    rungs = leaf_rungs(leaves)
    best, first = None, 0
    for candidates in CANDIDATE_RUNGS:
        for rung in range(first, len(rungs)):
            setting = Setting(rungs[rung], candidates)
            if best is not None and cost(setting) >= cost(best):
                break
            if recall(setting) >= target:
                # Fewer candidates never need fewer leaves.
                best, first = setting, rung
                break
        if best is None:
            return Setting(leaves, CANDIDATE_RUNGS[0])
    return best or Setting(leaves, CANDIDATE_RUNGS[0])


def count_bytes(setting: Setting, count: int, dimension: int) -> float:
    """Estimates the bytes that ScaNN reads per query.

    Counted instead of timed, so that equal vectors give equal settings on a busy machine, too.
    """
    # Four bits per two dimensions in the leaves; float32 for the candidates.
    codes = setting.leaves / count_leaves(count) * count * dimension / 4
    return codes + NEIGHBORS * setting.candidates * dimension * 4


def tenth_scores(vectors_XD: np.ndarray, own_Q: np.ndarray) -> np.ndarray:
    """Returns the tenth best score of the passages `own_Q` among all others, float32 [Q]."""
    best_QK = np.full((len(own_Q), K), -np.inf, np.float32)
    for start in range(0, len(vectors_XD), BLOCK):
        scores_QB = vectors_XD[own_Q] @ vectors_XD[start : start + BLOCK].T
        inside_Q = (own_Q >= start) & (own_Q < start + BLOCK)
        scores_QB[inside_Q, own_Q[inside_Q] - start] = -np.inf
        scores_QB = np.concatenate([best_QK, scores_QB], axis=1)
        best_QK = np.partition(scores_QB, -K, axis=1)[:, -K:]
    return best_QK.min(axis=1)


def recall_of_others(
    searcher: ScannSearcher, vectors_XD: np.ndarray, own_Q: np.ndarray, tenth_Q: np.ndarray
) -> float:
    """Returns the recall of the ten nearest others of `own_Q`; a hit counts by its score."""
    scores_QK, index_QK = searcher.search(vectors_XD[own_Q], K + 1)
    # Scores are on a grid, and the last bits of a product depend on its order.
    is_near_QK = scores_QK >= tenth_Q[:, None] - 2 / GRID
    found_Q = np.sum(is_near_QK & (index_QK != own_Q[:, None]), axis=1)
    return float(np.minimum(found_Q, K).mean() / K)


def tune(searcher: ScannSearcher, vectors_XD: np.ndarray, target: float) -> dict[str, Any]:
    """Tunes a searcher; warns on stderr if no setting reaches the target.

    Returns `target`, and above the limit of brute force `leaves`, `candidates`, the `recall`
    reached and `queries_per_s` of the sample in one call.
    """
    count, dimension = vectors_XD.shape
    if count < BRUTE_FORCE:
        return {"target": target, "recall": 1.0}
    own_Q = np.sort(np.random.default_rng(0).choice(count, min(SAMPLE, count), replace=False))
    tenth_Q = tenth_scores(vectors_XD, own_Q)

    def recall(setting: Setting) -> float:
        return recall_of_others(searcher.at(setting), vectors_XD, own_Q, tenth_Q)

    best = cheapest(recall, lambda x: count_bytes(x, count, dimension), target, count_leaves(count))
    share = recall(best)
    if share < target:
        print(
            f"ragrl: the recall {target} cannot be reached: the most thorough search reaches "
            f"{share:.4f} and is used; give a lower recall, or the index kind 'exact'",
            file=sys.stderr,
        )
    start = time.perf_counter()
    searcher.at(best).search(vectors_XD[own_Q], K)
    speed = len(own_Q) / (time.perf_counter() - start)
    values = {"target": target, **best._asdict(), "recall": round(share, 4)}
    return values | {"queries_per_s": round(speed, 1)}
