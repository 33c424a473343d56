"""Measures of a retriever on questions with gold passages or answers; their texts are queries."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.description import encoder_checksum
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.measures import DEPTH, KS, answers_in, example_names, measure, missing_gold
from jax_ragrl.retrieval.rerank import PairReranker, RerankedRetriever
from jax_ragrl.types import Hits, Passage, Question

Measure = Callable[[Question, Sequence[Passage]], Mapping[str, float]]
Results = Sequence[Hits | EffectError]


def search_quality(retriever: Retriever, questions: Sequence[Question]) -> dict[str, float]:
    """Returns the means of `measures.measure` over the questions that name gold passages, 0 to 1.

    Questions whose search failed are excluded, as in an evaluation.

    Raises:
      UserError: no question names gold passages.
      EffectError: every search failed.
    """
    with_gold = [question for question in questions if question.gold]
    if not with_gold:
        raise UserError(
            f"none of the {len(questions)} questions names gold passages, and recall needs them: "
            "add them, or give relevance judgments (--qrels)"
        )
    return mean_measures(with_gold, _search(retriever, with_gold))


def mean_measures(questions: Sequence[Question], results: Results) -> dict[str, float]:
    """Computes the mean `measures.measure` of results, one per question, which all have gold."""
    return _mean(lambda q, passages: measure(q.gold, passages), questions, results)


def _search(retriever: Retriever, questions: Sequence[Question]) -> Results:
    return retriever.search([question.text for question in questions], max(*KS, DEPTH))


def _mean(compute: Measure, questions: Sequence[Question], results: Results) -> dict[str, float]:
    pairs = zip(questions, results, strict=True)
    rows = [compute(q, hits.passages) for q, hits in pairs if isinstance(hits, Hits)]
    if not rows:
        raise next(x for x in results if isinstance(x, EffectError))
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def report_missing_gold(questions: Sequence[Question], corpus: Corpus) -> dict[str, int]:
    """Counts distinct `gold` names, and as `gold_missing` (with a warning) those of no passage."""
    missing = missing_gold(questions, corpus.passages)
    count = len({name for question in questions for name in question.gold})
    if missing:
        print(
            f"ragrl: warning: {len(missing)} of {count} gold passages are not in the corpus, such "
            f"as {missing[0]!r}: no search can return them, and recall counts them as misses; the "
            f"corpus has {example_names(corpus.passages)}",
            file=sys.stderr,
        )
    return {"gold": count, "gold_missing": len(missing)}


def report_gold(retriever: Retriever, questions: Sequence[Question]) -> dict[str, int]:
    """As `report_missing_gold`; empty for questions without gold, and for a server."""
    corpus = next(corpora_of(retriever), None)
    if corpus is None or not any(question.gold for question in questions):
        return {}
    return report_missing_gold(questions, corpus)


def parts_of(retriever: Any) -> Iterator[Any]:
    """Yields a retriever and those that it fuses or reranks."""
    yield retriever
    inner = getattr(retriever, "retriever", None)
    for part in (*getattr(retriever, "retrievers", ()), *([inner] if inner else [])):
        yield from parts_of(part)


def corpora_of(retriever: Any) -> Iterator[Corpus]:
    """Yields the corpora of a retriever and of those that it fuses or reranks."""
    corpora = (getattr(part, "corpus", None) for part in parts_of(retriever))
    return (corpus for corpus in corpora if isinstance(corpus, Corpus))


def corpus_fingerprints(retriever: Any) -> list[str]:
    """Returns the fingerprints of the corpora of a retriever, sorted, each once."""
    return sorted({corpus.fingerprint for corpus in corpora_of(retriever)})


def trained_builds(retriever: Any) -> list[str]:
    """Returns fingerprint and build of each trained searcher (`DenseRetriever.build`), sorted."""
    parts = [part for part in parts_of(retriever) if getattr(part, "build", "")]
    return sorted(f"{part.fingerprint} {part.build}" for part in parts)


def model_checksums(retriever: Any) -> list[str]:
    """Returns a checksum of each encoder with weights and of each cross-encoder, in their order.

    Hashed words are a function of their corpus.
    """
    checksums = []
    for part in parts_of(retriever):
        if isinstance(part, DenseRetriever) and not isinstance(part.encoder, HashedEncoder):
            checksums.append(encoder_checksum(part.encoder.describe()))
        elif isinstance(part, RerankedRetriever) and isinstance(part.reranker, PairReranker):
            checksums.append(part.reranker.model.weights)
    return checksums


def describe_quality(
    retriever: Retriever, questions: Sequence[Question], corpus: Corpus
) -> dict[str, Any]:
    """Returns the report of a retriever on questions; empty without questions.

    It has the number of `questions`, and either the counts of `report_missing_gold` and
    `search_quality`, or without gold the share with an answer in one of the first k passages
    (`answer_recall@k`, the top-k accuracy of Karpukhin et al. 2020). Short answers, such as "yes",
    also occur in passages that do not support them.
    """
    if not questions:
        return {}
    count = {"questions": len(questions)}
    if any(question.gold for question in questions):
        return count | report_missing_gold(questions, corpus) | search_quality(retriever, questions)
    results = _search(retriever, questions)
    return count | _mean(lambda q, found: answers_in(q.answers, found), questions, results)
