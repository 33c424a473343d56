"""Pages of a search join to a longer one, whatever is asked together."""

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.base import search_pages
from jax_ragrl.types import Hits, Passage


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


def ids(hits):
    return [passage.id for passage in hits.passages]


def test_pages_are_consecutive_ranks():
    pages = search_pages(Counting(), [("q", 4, page) for page in range(4)])
    assert [ids(page) for page in pages] == [
        [f"q-{rank}" for rank in range(4 * page, min(4 * page + 4, 10))] for page in range(4)
    ]
    assert all(len(page.passages) == len(page.scores) for page in pages)


def test_all_requests_are_one_search_of_distinct_queries():
    retriever = Counting()
    requests = [("b", 2, 0), ("a", 3, 1), ("b", 1, 2), ("b", 2, 0)]
    found = search_pages(retriever, requests)
    assert retriever.calls == [(("b", "a"), 6)]
    alone = [search_pages(Counting(), [request])[0] for request in requests]
    assert found == alone
    assert search_pages(retriever, []) == [] and len(retriever.calls) == 1


@pytest.mark.parametrize("request_", [("q", 0, 0), ("q", 1, -1)])
def test_impossible_pages_are_refused(request_):
    with pytest.raises(UserError, match="is not a page"):
        search_pages(Counting(), [request_])
