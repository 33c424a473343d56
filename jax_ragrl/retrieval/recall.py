"""Recall of gold passages."""

from __future__ import annotations

from collections.abc import Sequence

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.types import Hits, Question


def recall_at(gold: Sequence[str], hits: Hits, k: int) -> float:
    """Computes the share of distinct gold names among ids and titles of the first k hits.

    Args:
      gold: ids or titles of the gold passages, at least one.
      hits: hits of a search, best first.
      k: number of hits to consider.
    """
    # Some data sets name gold passages by id, others by title.
    names = {name for passage in hits.passages[:k] for name in (passage.id, passage.title)}
    return len(names & set(gold)) / len(set(gold))


def recall(
    retriever: Retriever, questions: Sequence[Question], ks: Sequence[int] = (2, 5, 10)
) -> dict[str, float]:
    """Computes mean recall over the questions that name gold passages, with the text as query.

    Questions whose search failed are excluded, as in an evaluation.

    Args:
      retriever: the retriever.
      questions: questions; those without gold passages are ignored.
      ks: depths.

    Returns:
      `{"recall@2": ..., ...}`, one entry per depth.

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
    # One search at the greatest depth serves all depths.
    results = retriever.search([question.text for question in with_gold], max(ks))
    pairs = [(q, h) for q, h in zip(with_gold, results, strict=True) if isinstance(h, Hits)]
    if not pairs:
        raise next(h for h in results if isinstance(h, EffectError))
    return {f"recall@{k}": sum(recall_at(q.gold, h, k) for q, h in pairs) / len(pairs) for k in ks}
