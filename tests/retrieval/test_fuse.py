"""Fused and reranked hits follow their formulas; neither depth nor pages change their order."""

import dataclasses
import sys
import types
from collections.abc import Sequence

import numpy as np
import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import search_pages
from jax_ragrl.retrieval.fuse import FusedRetriever, fuse, scaled_scores
from jax_ragrl.retrieval.rerank import PairReranker, RerankedRetriever, load_cross_encoder
from jax_ragrl.types import Hits, Passage

PASSAGES = tuple(Passage(f"p{n}", f"title {n}", f"text {n}") for n in range(12))


def hits_of(*numbers: int, scores: Sequence[float] | None = None) -> Hits:
    values = range(len(numbers), 0, -1) if scores is None else scores
    return Hits(tuple(PASSAGES[n] for n in numbers), tuple(float(s) for s in values))


def ids(hits: Hits) -> list[int]:
    return [int(passage.id[1:]) for passage in hits.passages]


@dataclasses.dataclass
class Fixed:
    """A retriever with the same hits for every query; the query `fail` fails."""

    hits: Hits
    fingerprint: str = "corpus"
    depths: list[int] = dataclasses.field(default_factory=list)

    def search(self, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
        self.depths.append(k)
        hits = Hits(self.hits.passages[:k], self.hits.scores[:k])
        return [EffectError("offline") if query == "fail" else hits for query in queries]


def test_reciprocal_ranks_are_added():
    first, second = hits_of(3, 1, 2), hits_of(1, 4)
    fused = fuse([first, second], (1.0, 2.0), "rrf")
    expected = {1: 1 / 62 + 2 / 61, 4: 2 / 62, 3: 1 / 61, 2: 1 / 63}
    assert ids(fused) == [*expected]
    np.testing.assert_allclose(fused.scores, [*expected.values()])


def test_scores_are_scaled_per_query_before_they_are_added():
    first, second = hits_of(3, 1, 2, scores=(30, 20, 10)), hits_of(1, 4, scores=(0.9, 0.8))
    fused = fuse([first, second], (1.0, 0.5), "weighted")
    assert (ids(fused), fused.scores) == ([3, 1, 2, 4], (1.0, 1.0, 0.0, 0.0))
    assert scaled_scores(hits_of(1, 2, scores=(5, 5))).tolist() == [1, 1]
    assert scaled_scores(hits_of()).tolist() == []


def test_ties_are_in_the_order_of_the_retrievers():
    assert ids(fuse([hits_of(5, 6), hits_of(1, 2)], (1.0, 1.0), "rrf")) == [5, 1, 6, 2]
    three = [hits_of(1, 2), hits_of(2, 1), hits_of(3)]
    # Sums of equal parts tie in any order of the parts.
    assert (
        fuse(three, (1.0,) * 3, "rrf").scores[0] == fuse(three[::-1], (1.0,) * 3, "rrf").scores[0]
    )


def test_passages_of_other_corpora_are_not_merged_by_their_id():
    other = Passage("p1", "title 1", "another text")
    fused = fuse([hits_of(1), Hits((other,), (1.0,))], (1.0, 1.0), "rrf")
    assert fused.passages == (PASSAGES[1], other)


@pytest.mark.parametrize("method", ["rrf", "weighted"])
@pytest.mark.parametrize("candidates", [1, 3, 20])
def test_the_first_hits_do_not_depend_on_the_depth(method, candidates):
    parts = (Fixed(hits_of(*range(8))), Fixed(hits_of(7, 9, 3, 11, 0)))
    retriever = FusedRetriever(parts, (1.0, 1.0), method, candidates)
    (whole,) = retriever.search(["x"], 50)
    assert len(set(whole.passages)) == len(whole.passages) <= 2 * candidates
    for k in range(1, 15):
        (hits,) = retriever.search(["x"], k)
        assert hits == Hits(whole.passages[:k], whole.scores[:k])
    assert set(parts[0].depths) == {candidates}
    pages = search_pages(retriever, [("x", 2, page) for page in range(8)])
    assert [p for page in pages for p in page.passages] == [*whole.passages]


def test_a_query_that_fails_in_one_retriever_fails():
    parts = (Fixed(hits_of(1)), Fixed(hits_of(2), "other"))
    retriever = FusedRetriever(parts, (1.0, 1.0))
    good, bad = retriever.search(["x", "fail"], 2)
    assert ids(good) == [1, 2] and isinstance(bad, EffectError)
    assert retriever.fingerprint == "corpus + other"
    assert FusedRetriever((parts[0], parts[0]), (1.0, 1.0)).fingerprint == "corpus"


class Backwards:
    """Prefers the last passages; the query `refuse` fails."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def scores_of(self, pairs):
        self.seen += [(query, len(passages)) for query, passages in pairs]
        return [
            EffectError("no reply")
            if query == "refuse"
            else np.arange(len(passages), dtype=np.float32)
            for query, passages in pairs
        ]


def test_candidates_are_reordered_and_deeper_hits_follow_in_their_order():
    reranker = Backwards()
    retriever = RerankedRetriever(Fixed(hits_of(*range(8))), reranker, 3)
    (whole,) = retriever.search(["x"], 20)
    assert ids(whole) == [2, 1, 0, 3, 4, 5, 6, 7]
    assert whole.scores == (2, 1, 0, -1, -2, -3, -4, -5)
    for k in range(1, 10):
        (hits,) = retriever.search(["x"], k)
        assert hits == Hits(whole.passages[:k], whole.scores[:k])
    assert set(reranker.seen) == {("x", 3)}, "the reranker reads the same passages at any depth"
    with pytest.raises(UserError, match="k=0"):
        retriever.search(["x"], 0)


def test_a_query_may_fail_in_either_stage():
    reranker = Backwards()
    retriever = RerankedRetriever(Fixed(hits_of(1, 2)), reranker)
    failed, refused, good = retriever.search(["fail", "refuse", "x"], 1)
    assert str(failed) == "offline" and str(refused) == "no reply" and ids(good) == [2]
    assert [query for query, _ in reranker.seen] == ["refuse", "x"]
    assert RerankedRetriever(Fixed(hits_of()), reranker).search(["x"], 3) == [hits_of()]


class Lengths:
    """A cross-encoder that scores a pair by a number in its text."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def scores(self, pairs):
        self.batches.append(len(pairs))
        return np.array([int(text[-1]) * len(query) for query, text in pairs], np.float32)


def test_a_model_of_pairs_reads_all_queries_in_one_batch(monkeypatch):
    model = Lengths()
    fake = types.ModuleType("cross_encoder")
    fake.load_cross_encoder = {"folder": model}.__getitem__
    monkeypatch.setitem(sys.modules, "jax_ragrl.models.cross_encoder", fake)
    reranker = load_cross_encoder("folder")
    assert isinstance(reranker, PairReranker)
    parts = reranker.scores_of([("ab", PASSAGES[1:3]), ("c", ()), ("d", PASSAGES[5:6])])
    assert [part.tolist() for part in parts] == [[2, 4], [], [5]] and model.batches == [3]
    assert reranker.scores_of([("c", ())])[0].shape == (0,) and model.batches == [3]


class Counting:
    """Finds `query-0`, `query-1`, ... up to ten; remembers what it was asked."""

    fingerprint = "0"

    def __init__(self):
        self.calls = []

    def search(self, queries, k):
        self.calls.append((tuple(queries), k))
        ranks = range(min(k, 10))
        return [
            Hits(tuple(Passage(f"{q}-{r}", "", "") for r in ranks), tuple(-float(r) for r in ranks))
            for q in queries
        ]


def test_all_requests_are_one_search_of_distinct_queries():
    retriever = Counting()
    requests = [("b", 2, 0), ("a", 3, 1), ("b", 1, 2), ("b", 2, 0)]
    found = search_pages(retriever, requests)
    assert retriever.calls == [(("b", "a"), 6)]
    alone = [search_pages(Counting(), [request])[0] for request in requests]
    assert found == alone
    assert search_pages(retriever, []) == [] and len(retriever.calls) == 1
    for impossible in (("q", 0, 0), ("q", 1, -1)):
        with pytest.raises(UserError, match="is not a page"):
            search_pages(retriever, [impossible])
