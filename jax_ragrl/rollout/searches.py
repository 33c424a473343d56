"""The passages that the searches of a rollout returned, and their measures against gold."""

from __future__ import annotations

import itertools

from jax_ragrl.retrieval.measures import (
    DEPTH,
    ndcg_at,
    recall_by_hop,
    recall_by_turn,
    reciprocal_rank,
)
from jax_ragrl.rollout.tree import SEARCH, Record
from jax_ragrl.types import Passage, Question


def search_turns(leaf: Record) -> list[tuple[Passage, ...]]:
    """Returns the passages of each turn of searches on the path to a leaf, in order.

    Concurrent searches share a round, and therefore a turn.
    """
    searches = [call for call in leaf.calls if call.purpose == SEARCH]
    rounds = itertools.groupby(searches, key=lambda call: call.round)
    return [tuple(p for call in calls for p in call.passages) for _, calls in rounds]


def seen_passages(leaf: Record) -> tuple[Passage, ...]:
    """Returns the distinct passages of all searches, in the order of their first appearance."""
    passages: dict[str, Passage] = {}
    for passage in itertools.chain.from_iterable(search_turns(leaf)):
        passages.setdefault(passage.id, passage)
    return tuple(passages.values())


def trajectory_measures(question: Question, leaf: Record, turns: int) -> dict[str, float]:
    """Computes the measures of the passages that a rollout has seen, from 0 to 1.

    `recall` over all passages, `ndcg@10` and `mrr@10` in the order of `seen_passages`,
    `recall/turn_T` of the passages up to turn T, counted from 1 (the last one stays if there are
    fewer than `turns`), and `recall/hop_H` if the question has one gold passage per hop.
    """
    gold, passages = question.gold, seen_passages(leaf)
    by_turn = recall_by_turn(gold, search_turns(leaf))
    total = by_turn[-1] if by_turn else 0.0
    by_turn += [total] * (turns - len(by_turn))
    measures = {
        "recall": total,
        f"ndcg@{DEPTH}": ndcg_at(gold, passages, DEPTH),
        f"mrr@{DEPTH}": reciprocal_rank(gold, passages, DEPTH),
    }
    measures |= {f"recall/turn_{turn}": x for turn, x in enumerate(by_turn, start=1)}
    hops = enumerate(recall_by_hop(question, passages), start=1)
    return measures | {f"recall/hop_{hop}": x for hop, x in hops}
