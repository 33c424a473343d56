"""The interface of a retriever, and paging over its hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jax_ragrl.errors import EffectError, UserError, one_each
from jax_ragrl.types import Hits


class Retriever(Protocol):
    """Finds passages. The first `k` of `k + 1` hits equal the hits of a search of depth `k`.

    `fingerprint` identifies the corpus (`Corpus.fingerprint`); for a server, whose corpus is
    unknown, it is the address.
    """

    @property
    def fingerprint(self) -> str: ...

    def search(self, queries: Sequence[str], k: int) -> Sequence[Hits | EffectError]:
        """Returns up to `k` passages per query, best first, in the order of the queries.

        Returns:
          One entry per query: its hits, or an `EffectError` if the search failed after all retries.
        """
        ...


def check_depth(k: int) -> None:
    """Raises `UserError` if `k` is below 1."""
    if k < 1:
        raise UserError(f"k={k} asks for no passages: give at least 1")


def search_all(retriever: Retriever, queries: Sequence[str], k: int) -> list[Hits]:
    """Searches all queries and raises the first failure.

    Raises:
      EffectError: the search of a query failed.
    """
    all_hits = []
    for hits in _hits(retriever, queries, k):
        if isinstance(hits, EffectError):
            raise hits
        all_hits.append(hits)
    return all_hits


def search_pages(
    retriever: Retriever, requests: Sequence[tuple[str, int, int]]
) -> list[Hits | EffectError]:
    """Returns the hits of requests (query, k, page) from one search over the distinct queries.

    `page` is counted from 0: a result has the ranks `k * page` to `k * page + k - 1`, none beyond
    the last hit, or is the `EffectError` of its query. All queries are searched as deep as the
    deepest request needs: one batched call costs less than several short ones.

    Raises:
      UserError: a request with k below 1 or page below 0.
    """
    invalid = [request for request in requests if request[1] < 1 or request[2] < 0]
    if invalid:
        query, k, page = invalid[0]
        raise UserError(
            f"k={k} and page={page} of {query!r} is not a page: k (a recipe's top_k) must be at "
            "least 1, and page at least 0"
        )
    if not requests:
        return []
    queries = list(dict.fromkeys(query for query, _, _ in requests))
    # One depth for all queries is safe, because the first hits do not depend on the depth.
    depth = max(k * (page + 1) for _, k, page in requests)
    hits_of = dict(zip(queries, _hits(retriever, queries, depth), strict=True))
    pages: list[Hits | EffectError] = []
    for query, k, page in requests:
        hits, ranks = hits_of[query], slice(k * page, k * page + k)
        if isinstance(hits, Hits):
            hits = Hits(hits.passages[ranks], hits.scores[ranks])
        pages.append(hits)
    return pages


def _hits(retriever: Retriever, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
    """Searches with a retriever, which may be a user's: `UserError` for a wrong reply."""
    found = one_each(retriever, retriever.search(queries, k), queries, Hits)
    for hits in found:
        if isinstance(hits, Hits) and len(hits.passages) != len(hits.scores):
            raise UserError(
                f"{type(retriever).__name__} returned {len(hits.passages)} passages with "
                f"{len(hits.scores)} scores: give each passage one score"
            )
    return found
