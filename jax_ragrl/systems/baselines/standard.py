"""Standard RAG, direct answering, and three systems with one change to the search.

Reranker       retrieves many passages, has the language model grade each, answers from the best
BGM            selects the passages to read, and their order (Ke et al. 2024, "Bridging the
               Preference Gap between Retrievers and LLMs")
QueryRewrite   writes the search queries (Rewrite-Retrieve-Read; Ma et al. 2023, "Query Rewriting
               for Retrieval-Augmented Large Language Models")

Departures from the papers
  1. The rerankers of the papers score with a fine-tuned cross-encoder; here the frozen language
     model grades every (question, passage) pair separately, from 0 to 10.
  2. The frozen language model takes the place of the trained bridge of BGM, which may repeat a
     passage, and of the trained rewriter. The hits of several queries are interleaved by rank, so
     that the reader sees `top_k` passages as in Standard RAG.
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

TOP_GRADE = 10
_NUMBER = re.compile(r"[0-9]{1,4}")
_LIST = re.compile(r"[0-9]{1,4}(?:\s*,\s*[0-9]{1,4})*")
_BULLET = re.compile(r"^\s*(?:[-*•]|[0-9]{1,3}[.)])\s+")


@dataclasses.dataclass(frozen=True)
class StandardRAG(ScriptedSystem):
    """Retrieves `top_k` passages for the question itself, then answers; 0 is direct answering."""

    style: str = "c3po"
    top_k: int = 10

    def steps(self, question: Question) -> Steps:
        """Yields the search, unless `top_k` is 0, then the request for the answer."""
        hits = (yield Search(question.text, self.top_k)) if self.top_k else None
        yield from self.finish(question, hits.passages if hits else ())


def direct(style: str) -> StandardRAG:
    """Returns direct answering: the language model without passages."""
    return StandardRAG(style, top_k=0)


def parse_grade(text: str) -> ParsedAction:
    """Parses the first whole number as the grade, 0 to 10."""
    match = _NUMBER.search(text)
    if not match or int(match[0]) > TOP_GRADE:
        return invalid_action("Invalid Grade")
    return ParsedAction("Grade", (int(match[0]),))


@dataclasses.dataclass(frozen=True)
class Reranker(ScriptedSystem):
    """Answers from the `top_k` best graded of `pool * top_k` passages; a malformed grade is 0."""

    FAULTS = {"Invalid Grade": "The grade of a passage is not a number of the scale."}

    pool: int = 5

    def steps(self, question: Question) -> Steps:
        """Searches, grades each passage (all requests at once) and answers."""
        hits = yield Search(question.text, self.pool * self.top_k)
        replies = yield from all_of([self.ask("grade", question, [p]) for p in hits.passages])
        grades = []
        for reply in replies:
            grade = yield from report_fault(parse_grade(reply))
            grades.append(grade.args[0] if grade.valid else 0)
        best = sorted(range(len(grades)), key=lambda i: -grades[i])[: self.top_k]
        yield from self.finish(question, [hits.passages[i] for i in best])


def parse_selection(text: str, count: int) -> ParsedAction:
    """Parses the first comma-separated list of numbers from 1 to `count`, or `none`."""
    match = _LIST.search(text)
    if not match:
        # An empty selection is legal; the answer is then given from memory.
        none = text.strip().strip(".").lower() == "none"
        return ParsedAction("Select") if none else invalid_action("Invalid Selection")
    numbers = tuple(dict.fromkeys(int(item) for item in match[0].split(",")))
    if not all(1 <= number <= count for number in numbers):
        return invalid_action("Invalid Document Idx")
    return ParsedAction("Select", numbers)


@dataclasses.dataclass(frozen=True)
class Selection(ScriptedSystem):
    """Selects at most `top_k` of `pool * top_k` passages; the first ones if that is malformed."""

    FAULTS = {
        "Invalid Selection": "None of the selected documents was shown.",
        "Invalid Document Idx": "The selection holds something other than numbers of documents.",
    }

    pool: int = 2

    def steps(self, question: Question) -> Steps:
        """Searches, selects and answers."""
        passages = (yield Search(question.text, self.pool * self.top_k)).passages
        reply = yield self.ask("select", question, passages)
        selection = yield from report_fault(parse_selection(reply, len(passages)))
        if selection.valid:
            passages = [passages[i - 1] for i in selection.args]
        yield from self.finish(question, passages[: self.top_k])


def parse_queries(text: str) -> ParsedAction:
    """Parses one query per line, without list marks, surrounding quotes and duplicates."""
    lines = (clean_query(_BULLET.sub("", line).strip(' "')) for line in text.splitlines())
    queries = tuple(dict.fromkeys(line for line in lines if line))
    return ParsedAction("Search", queries) if queries else invalid_action("No Query")


def interleave(rankings: Sequence[Sequence[Passage]], k: int) -> tuple[Passage, ...]:
    """Returns the first `k` distinct passages: the first of each ranking, then the second, ..."""
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
