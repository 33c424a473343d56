"""Passages that repeat others.

Copies fill a page of hits with one text, and gold passages whose copies carry other ids count as
misses.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_ragrl.corpus.passages import Corpus, passage_text
from jax_ragrl.types import Passage

EXAMPLES = 3


def duplicates(passages: Iterable[Passage]) -> list[tuple[int, int]]:
    """Returns pairs of the positions of a passage and of the first one with its title and text.

    White space is ignored. Memory: one 64-bit hash per passage.
    """
    # Python's own hash differs between processes, and examples must not. Arrays, because a
    # dictionary of 21 million integers needs several times the memory.
    texts = (" ".join(passage_text(passage).split()) for passage in passages)
    digests = (
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for text in texts
    )
    hash_X = np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64)
    _, first, inverse_X = np.unique(hash_X, return_index=True, return_inverse=True)
    origin_X = first[inverse_X]
    copies = np.flatnonzero(origin_X != np.arange(len(hash_X)))
    return list(zip(copies.tolist(), origin_X[copies].tolist(), strict=True))


def report_duplicates(corpus: Corpus) -> dict[str, Any]:
    """Counts copies of passages (`exact`), with pairs of ids (`examples`) and a line on stderr."""
    copies = duplicates(corpus.passages)
    passages = corpus.passages
    examples = [[passages[n].id, passages[m].id] for n, m in copies[:EXAMPLES]]
    if copies:
        n, m = examples[0]
        print(
            f"ragrl: warning: of {len(corpus)} passages, {len(copies)} are exact copies of earlier "
            f"ones, such as {n!r} of {m!r}: they repeat one text among the hits; remove them if "
            "they are not intended",
            file=sys.stderr,
        )
    return {"exact": len(copies), "examples": examples}
