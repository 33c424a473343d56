"""Passages that repeat others: exact copies, and near duplicates by the overlap of their words.

Copies fill a page of hits with one text, and gold passages whose copies carry other ids count as
misses. Two passages are near duplicates if the Jaccard similarity of their sets of five consecutive
words is at least 0.8 (shingles, Broder 1997). The search is exact: two such sets share an entry
among their rarest ones, so that only pairs with a common rare entry are compared (prefix filter,
Chaudhuri et al. 2006; Bayardo et al. 2007).
"""

from __future__ import annotations

import collections
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.corpus.passages import Corpus, passage_text
from jax_ragrl.text.words import WORD
from jax_ragrl.types import Passage

SHINGLE = 5  # words
NEAR = (4, 5)  # the least similarity as a fraction: integers, because 0.8 rounds
EXAMPLES = 3
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of a polynomial hash; odd, so that no bits are lost


def _hash(text: str) -> int:
    # Python's own hash differs between processes, and examples must not.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def exact_duplicates(passages: Iterable[Passage]) -> list[tuple[int, int]]:
    """Returns pairs of the positions of a passage and of the first one with its title and text.

    White space is ignored. Memory: one 64-bit hash per passage.
    """
    texts = (" ".join(passage_text(passage).split()) for passage in passages)
    # Arrays: a dictionary of 21 million integers needs several times the memory.
    hash_X = np.fromiter(map(_hash, texts), np.uint64)
    _, first, inverse_X = np.unique(hash_X, return_index=True, return_inverse=True)
    origin_X = first[inverse_X]
    copies = np.flatnonzero(origin_X != np.arange(len(hash_X)))
    return list(zip(copies.tolist(), origin_X[copies].tolist(), strict=True))


def shingles(text: str, hash_of: dict[str, int]) -> np.ndarray:
    """Returns the distinct shingles of a text as sorted uint64 hashes.

    A text of fewer than five words has one shingle, all of its words.

    Args:
      hash_of: hashes of words; new ones are added.
    """
    words = WORD.findall(text.lower())
    for word in words:
        if word not in hash_of:
            hash_of[word] = _hash(word)
    hashes = np.array([hash_of[word] for word in words], np.uint64)
    count = max(1, len(words) - SHINGLE + 1)
    sums = np.zeros(count, np.uint64)
    for offset in range(min(SHINGLE, len(words))):
        # Arithmetic modulo 2^64 wraps around without a warning for arrays.
        sums = sums * MULTIPLIER + hashes[offset : offset + count]
    return np.unique(sums)


def near_duplicates(passages: Iterable[Passage]) -> list[tuple[int, int]]:
    """Returns pairs of the positions of a passage and of an earlier near duplicate of it.

    Exact copies are near duplicates, too. Memory: 8 bytes per word of the corpus.
    """
    hash_of: dict[str, int] = {}
    sets = [shingles(passage_text(passage), hash_of) for passage in passages]
    if not sets:
        return []
    values, counts = np.unique(np.concatenate(sets), return_counts=True)
    earlier: dict[int, list[int]] = collections.defaultdict(list)
    pairs = []
    for n, shingle_S in enumerate(sets):
        rare = _rarest(shingle_S, counts[np.searchsorted(values, shingle_S)])
        candidates = sorted({m for key in rare for m in earlier[key]})
        match = next((m for m in candidates if is_near(shingle_S, sets[m])), None)
        if match is not None:
            pairs.append((n, match))
        for key in rare:
            earlier[key].append(n)
    return pairs


def _rarest(shingle_S: np.ndarray, count_S: np.ndarray) -> list[int]:
    """Returns the prefix of a set, in the order of rarity, that a near duplicate must share."""
    least, whole = NEAR
    # Sets with fewer common shingles than this are not similar enough, whatever the other one is.
    least_common = -(-least * len(shingle_S) // whole)
    # Ties are ordered by hash: all sets need one common order.
    order = np.lexsort((shingle_S, count_S))
    rarest: list[int] = shingle_S[order[: len(order) - least_common + 1]].tolist()
    return rarest


def is_near(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two sets have at least 4/5 of the elements of their union in common (Jaccard)."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return NEAR[1] * common >= NEAR[0] * (len(a) + len(b) - common)


def describe_duplicates(passages: Sequence[Passage], near: bool = False) -> dict[str, Any]:
    """Counts passages that repeat an earlier one.

    Args:
      near: whether near duplicates are searched too, which takes some tenths of a millisecond per
        passage of 100 words.

    Returns:
      `exact`, the number of copies, and `examples`, pairs of ids; with `near` the same under
      `near` and `near_examples`, without the copies.
    """
    copies = exact_duplicates(passages)
    report: dict[str, Any] = {"exact": len(copies), "examples": _ids(copies, passages)}
    if near:
        is_copy = {n for n, _ in copies}
        pairs = [pair for pair in near_duplicates(passages) if pair[0] not in is_copy]
        report |= {"near": len(pairs), "near_examples": _ids(pairs, passages)}
    return report


def _ids(pairs: Sequence[tuple[int, int]], passages: Sequence[Passage]) -> list[list[str]]:
    return [[passages[n].id, passages[m].id] for n, m in pairs[:EXAMPLES]]


def warning(report: Mapping[str, Any], count: int) -> str:
    """Returns one line about the duplicates of a corpus of `count` passages; empty without any."""
    counts = {"exact copies": report["exact"], "near duplicates": report.get("near", 0)}
    text = " and ".join(f"{n} {name}" for name, n in counts.items() if n)
    if not text:
        return ""
    n, m = (report["examples"] or report["near_examples"])[0]
    return (
        f"of {count} passages, {text} of earlier ones, such as {n!r} of {m!r}: they repeat one "
        "text among the hits; remove them if they are not intended"
    )


def report_duplicates(corpus: Corpus, near: bool = False) -> dict[str, Any]:
    """Returns `describe_duplicates` of a corpus, with a line on stderr if there are any."""
    report = describe_duplicates(corpus.passages, near)
    if line := warning(report, len(corpus)):
        print(f"ragrl: warning: {line}", file=sys.stderr)
    return report
