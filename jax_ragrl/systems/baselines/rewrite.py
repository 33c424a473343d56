"""QueryRewrite: the language model writes the search queries (Rewrite-Retrieve-Read, untrained).

Ma et al. 2023, "Query Rewriting for Retrieval-Augmented Large Language Models". The frozen language
model takes the place of the trained rewriter. The hits of several queries are interleaved by rank,
so that the reader sees `top_k` passages as in Standard RAG.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from jax_ragrl.rollout.effects import Search
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Steps, all_of
from jax_ragrl.systems.baselines.script import ScriptedSystem, clean_query, report_fault
from jax_ragrl.types import Passage, Question

_BULLET = re.compile(r"^\s*(?:[-*•]|[0-9]{1,3}[.)])\s+")


def parse_queries(text: str) -> ParsedAction:
    """Parses one query per line, without list marks, surrounding quotes and duplicates."""
    lines = (clean_query(_BULLET.sub("", line).strip(' "')) for line in text.splitlines())
    queries = tuple(dict.fromkeys(line for line in lines if line))
    return ParsedAction("Search", queries) if queries else invalid_action("No Query")


def interleave(rankings: Sequence[Sequence[Passage]], k: int) -> tuple[Passage, ...]:
    """Returns the first `k` distinct passages: the first of each ranking, then the second, ..."""
    # Rankings may differ in length: `None` fills the shorter ones.
    ranks = itertools.zip_longest(*rankings)
    return tuple(dict.fromkeys(p for rank in ranks for p in rank if p is not None))[:k]


def search_together(queries: Sequence[str], k: int) -> Steps:
    """Searches for all queries at once; returns the first `k` of the interleaved passages."""
    results = yield from all_of([Search(query, k) for query in queries])
    return interleave([hits.passages for hits in results], k)


@dataclasses.dataclass(frozen=True)
class QueryRewrite(ScriptedSystem):
    """Searches with at most `queries` queries; without a readable query, with the question."""

    FAULTS = {"No Query": "The text holds no query."}

    queries: int = 3

    def steps(self, question: Question) -> Steps:
        """Rewrites the question, searches (all queries at once) and answers."""
        reply = yield self.ask("rewrite", question, limit=str(self.queries))
        rewriting = yield from report_fault(parse_queries(reply))
        queries = rewriting.args[: self.queries] or (question.text,)
        documents = yield from search_together(queries, self.top_k)
        yield from self.finish(question, documents)
