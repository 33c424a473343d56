"""How many of the gold passages a retriever finds."""

from __future__ import annotations

from collections.abc import Sequence

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.types import Hits, Question


def found_share(gold: Sequence[str], hits: Hits, k: int) -> float:
    """The share of distinct gold names that the first k hits bear as id or title."""
    names = {name for passage in hits.passages[:k] for name in (passage.id, passage.title)}
    return len(names & set(gold)) / len(set(gold))


def recall(
    retriever: Retriever, questions: Sequence[Question], ks: Sequence[int] = (2, 5, 10)
) -> dict[str, float]:
    """Mean recall over the questions that name gold passages, searched by their own text.

    Questions whose search failed are left out, as in an evaluation.

    Returns:
      `{"recall@2": ..., ...}`, one entry for each of `ks`.

    Raises:
      UserError: no question names gold passages.
      EffectError: every search failed.
    """
    asked = [question for question in questions if question.gold]
    if not asked:
        raise UserError(
            f"none of the {len(questions)} questions names gold passages: recall needs some"
        )
    found = retriever.search([question.text for question in asked], max(ks))
    pairs = [(q, h) for q, h in zip(asked, found, strict=True) if isinstance(h, Hits)]
    if not pairs:
        raise next(h for h in found if isinstance(h, EffectError))
    return {
        f"recall@{k}": sum(found_share(q.gold, h, k) for q, h in pairs) / len(pairs) for k in ks
    }
