"""An index of the contexts whose keys and values a device keeps: which prompt can extend which one.

A context is found by its tokens alone, so no system says which conversation continues: a prompt
takes the kept context with which it has the most first tokens in common. If that is all of a
context, the context is extended in place; otherwise its common part is copied. When room is needed,
the context that was used longest ago is overwritten; if it is needed again, it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Reservation(NamedTuple):
    """Room for a context.

    Fields:
      ids: int32 tokens that the context will have.
      source: the kept context to copy first; equal to `target` if it is extended in place.
      target: where the context will be kept.
      start: tokens that are already there, or are copied.
    """

    ids: np.ndarray
    source: int
    target: int
    start: int


class KeptContexts:
    """The tokens of the contexts of one device.

    A reserved context keeps its old tokens until `commit`, because it is not computed before.

    Args:
      rows: the number of contexts.
      max_tokens: the largest number of tokens of a context.
    """

    def __init__(self, rows: int, max_tokens: int) -> None:
        self._ids_MC = np.full((rows, max_tokens), -1, np.int32)  # -1: no token
        self._length_M = np.zeros(rows, np.int64)
        self._last_use_M = np.full(rows, -1)
        self._is_reserved_M = np.zeros(rows, bool)
        self._uses = 0

    def match(self, ids: np.ndarray) -> tuple[int, int]:
        """Returns the context with the most first tokens in common with `ids`, and their number."""
        # One more column, which always differs: all of `ids` may be common.
        differs_ML = np.ones((len(self._ids_MC), len(ids) + 1), bool)
        differs_ML[:, :-1] = self._ids_MC[:, : len(ids)] != ids[None]
        first_M = differs_ML.argmax(axis=1)
        best = int(first_M.argmax())
        return best, int(first_M[best])

    def reserve(self, ids: np.ndarray) -> Reservation:
        """Reserves room for a context until the next `commit`."""
        source, start = self.match(ids)
        # All of a context, unless another prompt extends it in this wave.
        in_place = start == self._length_M[source] and not self._is_reserved_M[source]
        target = source if in_place and start else self._oldest()
        # A context that is overwritten can no longer be matched; one that is extended can.
        if target != source:
            self._forget(target)
        self._is_reserved_M[target] = True
        self._use(source)
        self._use(target)
        return Reservation(ids, source, target, start)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Stores the tokens of contexts that have been computed, which frees no other ones."""
        for ids, _, target, _ in reservations:
            self._forget(target)
            self._ids_MC[target, : len(ids)] = ids
            self._length_M[target] = len(ids)
            self._is_reserved_M[target] = False

    def _oldest(self) -> int:
        # Contexts that were never used come first, with -1.
        last_use_M = np.where(self._is_reserved_M, np.iinfo(np.int64).max, self._last_use_M)
        return int(last_use_M.argmin())

    def _forget(self, row: int) -> None:
        self._ids_MC[row], self._length_M[row] = -1, 0

    def _use(self, row: int) -> None:
        self._uses += 1
        self._last_use_M[row] = self._uses


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of first tokens that two contexts have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
