"""Random choices that are the same on every platform and Python version.

Only `random.Random.random` is drawn from: the standard library promises its stream, and no other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """One item, uniformly, from a single `random()` draw."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """A Fisher-Yates shuffle."""
    out = list(items)
    for i in range(len(out) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        out[i], out[j] = out[j], out[i]
    return out
