"""Every wrong answer has one kind of mistake."""

from __future__ import annotations

import pytest

from jax_ragrl.run.mistakes import KINDS, count_mistakes, mistake_of

GOLD = [{"id": "p1", "title": "A", "text": "a"}, {"id": "p2#char=0,4", "title": "B", "text": "b"}]


def prediction(**changes):
    row = {"scores": {"cover_em": 0.0}, "answer": "Bergen", "faults": []}
    return row | {"passages": GOLD, "gold_passages": ["p1", "p2"]} | changes


CASES = [
    ("", {"scores": {"cover_em": 1.0}}),
    ("", {"scores": {"cover_em": None}, "answer": None}),  # the environment failed
    ("malformed", {"answer": None, "faults": ["No Answer"]}),
    ("search_failed", {"answer": None, "passages": GOLD[:1]}),
    ("search_failed", {"answer": None, "passages": []}),
    ("gave_up", {"answer": None}),
    ("wrong", {"answer": None, "gold_passages": []}),
    ("never_searched", {"passages": []}),
    ("never_searched", {"passages": [], "costs": {"retrieval_calls": 0}}),
    ("premature", {"passages": [], "costs": {"retrieval_calls": 2}}),  # nothing was found
    ("premature", {"passages": GOLD[:1]}),
    ("premature", {"faults": ["Bad Query"], "passages": GOLD[1:]}),
    ("misread", {}),
    ("misread", {"gold_passages": ["A", "B"]}),  # gold by title
    ("wrong", {"gold_passages": []}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_a_wrong_answer_has_one_kind_of_mistake(kind, changes):
    assert mistake_of(prediction(**changes)) == kind


def test_mistakes_are_counted_in_the_order_of_kinds():
    counts = count_mistakes(prediction(**changes) for _, changes in CASES)
    assert list(counts) == list(KINDS)
    assert sum(counts.values()) == len(CASES) - 2 and counts["premature"] == 3
