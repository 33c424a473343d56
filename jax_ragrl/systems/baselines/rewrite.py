"""QueryRewrite: the language model writes the search queries (Rewrite-Retrieve-Read, untrained).

Ma et al. 2023, "Query Rewriting for Retrieval-Augmented Large Language Models", with the frozen
language model in the place of the trained rewriter. What several queries find is dealt out in turn,
the best of each first, so that the reader sees `top_k` passages as in Standard RAG.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from jax_ragrl.rollout.effects import Search
from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.systems.baselines.scripted import (
    Scripted,
    Steps,
    all_of,
    ask,
    checked,
    clean_query,
    finish,
)
from jax_ragrl.types import Passage, Question

_BULLET = re.compile(r"^\s*(?:[-*•]|[0-9]{1,3}[.)])\s+")


def parse_queries(text: str) -> Parsed:
    """One query a line; list marks and quotes around a query are left out."""
    lines = (clean_query(_BULLET.sub("", line).strip(' "')) for line in text.splitlines())
    queries = tuple(dict.fromkeys(line for line in lines if line))
    return Parsed("Search", queries) if queries else malformed("No Query")


def dealt(piles: Sequence[Sequence[Passage]], k: int) -> tuple[Passage, ...]:
    """The first `k` distinct passages, dealt from the piles in turn."""
    rounds = itertools.zip_longest(*piles)
    return tuple(dict.fromkeys(p for ranks in rounds for p in ranks if p is not None))[:k]


@dataclasses.dataclass(frozen=True)
class QueryRewrite(Scripted):
    """At most `queries` queries; without a readable one the question itself is searched."""

    queries: int = 3

    def steps(self, question: Question) -> Steps:
        """Rewrite, search (all queries at once), answer."""
        values = {"question": question.text, "limit": str(self.queries)}
        parsed = yield from checked(parse_queries((yield ask(self.style, "rewrite", **values))))
        queries = parsed.args[: self.queries] or (question.text,)
        found = yield from all_of([Search(query, self.top_k) for query in queries])
        documents = dealt([hits.passages for hits in found], self.top_k)
        yield from finish(self.style, question, documents)
