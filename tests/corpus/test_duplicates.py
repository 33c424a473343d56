"""Duplicates are the pairs that a comparison of all passages finds."""

from __future__ import annotations

import itertools
import random

from jax_ragrl.corpus.duplicates import (
    describe_duplicates,
    exact_duplicates,
    is_near,
    near_duplicates,
    shingles,
    warning,
)
from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.types import Passage


def passage(n: int, text: str) -> Passage:
    return Passage(f"p{n}", "", text)


def changed(words: list[str], count: int, rng: random.Random) -> list[str]:
    """Words of which `count` consecutive ones are replaced."""
    start = rng.randrange(len(words) - count + 1)
    return [*words[:start], *(f"new{rng.random()}" for _ in range(count)), *words[start + count :]]


def corpus() -> list[Passage]:
    rng = random.Random(0)
    texts = [[f"w{rng.randrange(200)}" for _ in range(rng.randrange(3, 80))] for _ in range(60)]
    copies = [changed(rng.choice(texts), rng.randrange(3), rng) for _ in range(60)]
    return [passage(n, " ".join(words)) for n, words in enumerate(texts + copies)]


def test_near_duplicates_are_those_of_a_comparison_of_all_pairs():
    passages, hash_of = corpus(), {}
    sets = [shingles(passage_text(p), hash_of) for p in passages]
    pairs = [(n, m) for m, n in itertools.combinations(range(len(sets)), 2)]
    expected: dict[int, int] = {}
    for n, m in sorted(pairs):
        if is_near(sets[n], sets[m]):
            expected.setdefault(n, m)
    assert near_duplicates(passages) == sorted(expected.items())
    assert 30 < len(expected) < 60, "the corpus has pairs on both sides of the limit"


def test_similarity_is_the_share_of_common_shingles():
    hash_of: dict[str, int] = {}
    words = [f"w{n}" for n in range(24)]  # 20 shingles

    def near(other: list[str]) -> bool:
        return is_near(shingles(" ".join(words), hash_of), shingles(" ".join(other), hash_of))

    assert near(words + ["a", "b", "c", "d", "e"])  # 20 of 25: exactly 4/5
    assert not near(words + ["a", "b", "c", "d", "e", "f"])  # 20 of 26
    assert near([word.upper() for word in words])


def test_exact_copies_ignore_white_space_and_name_the_first():
    passages = [passage(0, "a b"), passage(1, "a c"), passage(2, "a  b\n"), passage(3, "a b")]
    assert exact_duplicates(passages) == [(2, 0), (3, 0)]
    other_title = [passage(0, "a b"), Passage("p1", "a", "b")]
    assert exact_duplicates([*other_title, Passage("p2", "b", "a")]) == [(1, 0)]


def test_a_report_counts_copies_once():
    long = " ".join(f"w{n}" for n in range(40))
    passages = [passage(0, long), passage(1, long), passage(2, f"{long} end"), passage(3, "x")]
    report = describe_duplicates(passages, near=True)
    assert (report["exact"], report["near"]) == (1, 1)
    assert report["examples"] == [["p1", "p0"]] and report["near_examples"] == [["p2", "p0"]]
    line = warning(report, 4)
    assert "1 exact copies and 1 near duplicates" in line and "\n" not in line
    assert warning(describe_duplicates(passages[2:], near=True), 2) == ""
    assert near_duplicates([]) == exact_duplicates([]) == []
