"""What a retriever is, and paging over one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.types import Hits


class Retriever(Protocol):
    """Finds passages. A longer search extends a shorter one: the first of `k + 1` hits are the `k`.

    `fingerprint` is that of the corpus it searches (`Corpus.fingerprint`), or the address of a
    server whose corpus is not known here.
    """

    @property
    def fingerprint(self) -> str: ...

    def search(self, queries: Sequence[str], k: int) -> Sequence[Hits | EffectError]:
        """The `k` best passages of each query, fewer where there are no more, best first.

        In place of what could not be found, after retries, stands an `EffectError`.
        """
        ...


def check_depth(k: int) -> None:
    """`UserError` where a search of `k` passages is none."""
    if k < 1:
        raise UserError(f"k={k} asks for no passages: give at least 1")


def search_all(retriever: Retriever, queries: Sequence[str], k: int) -> list[Hits]:
    """The hits of every query, where none may be missing: raises the first `EffectError`."""
    found = []
    for hits in retriever.search(queries, k):
        if isinstance(hits, EffectError):
            raise hits
        found.append(hits)
    return found


def page_of(hits: Hits, k: int, page: int) -> Hits:
    """Ranks `k * page` to `k * page + k - 1`; empty beyond the last."""
    ranks = slice(k * page, k * page + k)
    return Hits(hits.passages[ranks], hits.scores[ranks])


def search_pages(
    retriever: Retriever, requests: Sequence[tuple[str, int, int]]
) -> list[Hits | EffectError]:
    """Answers requests (query, k, page) with one search, each distinct query asked once.

    All queries are searched as deep as the deepest request needs: one batched call costs less than
    several short ones.

    Args:
      retriever: any.
      requests: `k` at least 1, `page` counted from 0.

    Returns:
      The hits of each request, in order; an `EffectError` where its query failed.

    Raises:
      UserError: a request with k below 1 or page below 0.
    """
    wrong = [request for request in requests if request[1] < 1 or request[2] < 0]
    if wrong:
        query, k, page = wrong[0]
        raise UserError(
            f"k={k} and page={page} of {query!r} has no page: ask for k of at least 1 (a recipe's "
            "top_k), and for page 0 or a later one"
        )
    if not requests:
        return []
    queries = list(dict.fromkeys(query for query, _, _ in requests))
    depth = max(k * (page + 1) for _, k, page in requests)
    found = dict(zip(queries, retriever.search(queries, depth), strict=True))
    return [
        hits if isinstance(hits := found[query], EffectError) else page_of(hits, k, page)
        for query, k, page in requests
    ]
