"""Measures of ranked passages, with binary relevance: a passage is gold or it is not.

Gold passages are named by id or, if a data set has no ids, by title. A gold name counts once, at
its first passage, because several passages may share a title. With unique ids the program
`trec_eval` gives the same values for the same judgments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.types import Passage, Question

KS = (2, 5, 10)  # depths of recall in reports
DEPTH = 10  # of nDCG and of the reciprocal rank in reports


def names_of(passages: Iterable[Passage]) -> set[str]:
    """Returns the names by which gold may refer to passages, such as ids and titles."""
    return {name for passage in passages for name in passage.names}


def recall_at(gold: Sequence[str], passages: Sequence[Passage], k: int) -> float:
    """Computes the share of distinct gold names among ids and titles of the first k passages."""
    return len(names_of(passages[:k]) & set(gold)) / len(set(gold))


def gains(gold: Sequence[str], passages: Sequence[Passage]) -> list[int]:
    """Returns 1 for each passage with a gold name that no earlier passage has, else 0."""
    missing, gain = set(gold), []
    for passage in passages:
        names = missing & passage.names
        missing -= names
        gain.append(int(bool(names)))
    return gain


def ndcg_at(gold: Sequence[str], passages: Sequence[Passage], k: int) -> float:
    """Computes the normalized discounted cumulative gain (Järvelin and Kekäläinen 2002).

    nDCG = Σ_r gain_r / log2(1 + r)  divided by its value if all gold passages came first
    """
    discounts = [1 / math.log2(1 + r) for r in range(1, k + 1)]
    pairs = zip(gains(gold, passages[:k]), discounts, strict=False)
    ideal = sum(discounts[: len(set(gold))])
    return sum(gain * discount for gain, discount in pairs) / ideal


def reciprocal_rank(gold: Sequence[str], passages: Sequence[Passage], k: int) -> float:
    """Computes 1 / rank of the first gold passage; 0 if there is none (Voorhees 1999)."""
    gain = gains(gold, passages[:k])
    return 1 / (1 + gain.index(1)) if 1 in gain else 0.0


def measure(gold: Sequence[str], passages: Sequence[Passage]) -> dict[str, float]:
    """Returns the measures of one ranking: recall at `KS`, nDCG and MRR at `DEPTH`."""
    recalls = {f"recall@{k}": recall_at(gold, passages, k) for k in KS}
    return recalls | {
        f"ndcg@{DEPTH}": ndcg_at(gold, passages, DEPTH),
        f"mrr@{DEPTH}": reciprocal_rank(gold, passages, DEPTH),
    }


def answers_in(answers: Sequence[str], passages: Sequence[Passage]) -> dict[str, float]:
    """Returns by `answer_recall@k` whether one of the first k passages has an answer, for `KS`."""
    hits = [cover_match_tokens(f"{p.title} {p.text}", answers) for p in passages[: max(KS)]]
    return {f"answer_recall@{k}": max(hits[:k], default=0.0) for k in KS}


def recall_by_turn(gold: Sequence[str], turns: Iterable[Sequence[Passage]]) -> list[float]:
    """Returns the recall of all passages up to each turn, of which the last is the total."""
    names: set[str] = set()
    recalls = []
    for passages in turns:
        names |= names_of(passages) & set(gold)
        recalls.append(len(names) / len(set(gold)))
    return recalls


def recall_by_hop(question: Question, passages: Iterable[Passage]) -> list[float]:
    """Returns 1 or 0 per hop: whether its gold passage is among the passages.

    Only questions with one gold name per hop have entries: otherwise it is unknown which belongs
    to which.
    """
    names = names_of(passages)
    if question.hops != len(question.gold):
        return []
    return [float(name in names) for name in question.gold]


def missing_gold(questions: Iterable[Question], passages: Iterable[Passage]) -> list[str]:
    """Returns the gold names that name no passage (`Passage.names`), in order."""
    missing = dict.fromkeys(name for question in questions for name in question.gold)
    for passage in passages:
        for name in passage.names:
            missing.pop(name, None)
    return list(missing)


def example_names(passages: Sequence[Passage], count: int = 3) -> str:
    """Returns the ids of some passages, and a title, to show what gold may name."""
    # Evenly spaced, because the first ones may all be of one document.
    examples = passages[:: max(1, len(passages) // count)][:count]
    ids = ", ".join(repr(passage.id) for passage in examples)
    title = next((passage.title for passage in examples if passage.title), "")
    return f"ids such as {ids}" + (f" or titles such as {title!r}" if title else "")
