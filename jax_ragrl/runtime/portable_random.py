"""Random choices that are equal on every platform and Python version.

They draw from `random.Random.random` only: it is the one method whose sequence the standard library
guarantees across versions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Returns one item, uniformly, from a single `random()` draw."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """Returns the items in random order (Fisher-Yates), from one draw per item but the first."""
    out = list(items)
    for i in range(len(out) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        out[i], out[j] = out[j], out[i]
    return out
