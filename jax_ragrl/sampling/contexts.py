"""A tree of the contexts whose keys and values a device keeps: what a prompt need not compute.

Contexts are kept in pages of `PAGE` tokens. Contexts that begin equally share the pages of their
beginning, so the instructions of a role and the past of a conversation are held once:

    instructions of a role -+- question 1 -+- reply a
                            |              +- reply b - observation
                            +- question 2

A context is found by its tokens alone, so no system says which conversation continues. A page that
is not full is extended in place if a prompt has all of its tokens, and copied if it has only the
first ones. When room is needed, the page that was used longest ago is given up, the last one of a
context first; if it is needed again, it is computed again.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PAGE = 16  # tokens per page


@dataclasses.dataclass(eq=False)
class _Node:
    """A page of the tree; the root has no page.

    Fields:
      number: the number of the page.
      parent: the page before it.
      ids: int32 tokens, at most `PAGE`; only a full page has children.
      children: the pages after it, by the bytes of their tokens.
      pins: the reservations that read or extend it.
      is_extended: whether one of these extends it.
    """

    number: int
    parent: _Node | None
    ids: np.ndarray
    children: dict[bytes, _Node] = dataclasses.field(default_factory=dict)
    pins: int = 0
    is_extended: bool = False

    def best(self, ids: np.ndarray) -> tuple[_Node | None, int]:
        """Returns the child with the most first tokens in common, and their number."""
        equal = self.children.get(ids.tobytes())
        if equal is not None:
            return equal, len(ids)
        common = [(common_length(ids, child.ids), child) for child in self.children.values()]
        length, child = max(common, key=lambda pair: pair[0], default=(0, None))
        return child, length


class Reservation(NamedTuple):
    """Room for a context.

    Fields:
      ids: int32 tokens that the context will have.
      start: tokens that are kept already.
      pages: the numbers of all pages that the context will have.
      source: the page that has the first tokens of the page in which the context is continued;
        another one if they have to be copied.
    """

    ids: np.ndarray
    start: int
    pages: tuple[int, ...]
    source: int

    def pages_before(self, at: int) -> dict[int, int]:
        """Returns the pages to read by their places, to continue at a token."""
        pages = dict(enumerate(self.pages))
        if at == self.start and at % PAGE:
            pages[at // PAGE] = self.source
        return pages

    def pages_of(self, first: int, end: int) -> dict[int, int]:
        """Returns the pages to write by their places, for tokens from `first` to before `end`."""
        end = min(end, len(self.ids))
        places = range(first // PAGE, page_count(end)) if first < end else range(0)
        return {place: self.pages[place] for place in places}


class KeptContexts:
    """The pages of one device.

    Args:
      pages: the number of pages.
    """

    def __init__(self, pages: int) -> None:
        self._root = _Node(-1, None, np.zeros(0, np.int32))
        self._nodes: dict[int, _Node] = {}
        self._free = [*range(pages)][::-1]
        # Pages by their last use. A page is used after those that follow it, so the page that was
        # used longest ago is the last one of its context.
        self._uses = OrderedDict[_Node, None]()
        self._reserved = list[_Node]()

    def known_tokens(self, ids: np.ndarray) -> int:
        """Returns the most first tokens that `ids` have in common with a kept context."""
        return self._match(ids)[1]

    def reserve(self, ids: np.ndarray) -> Reservation | None:
        """Reserves room for a context until it is committed; None if other ones have all room."""
        path, start = self._match(ids)
        old = [node.number for node in path]
        is_copied = bool(path) and _must_copy(path[-1], ids, start)
        shared = old[:-1] if is_copied else old
        # 1. Give up no page that the context reads.
        for node in path:
            node.pins += 1
        self._use(path)
        new = self._take(page_count(len(ids)) - len(shared))
        if new is None:
            for node in path:
                node.pins -= 1
            return None
        # 2. Until it is committed, other ones neither take its pages nor extend the same one.
        self._reserved += path
        if start < len(ids) and start % PAGE and not is_copied:
            path[-1].is_extended = True
        return Reservation(ids, start, (*shared, *new), old[-1] if old else -1)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Adds contexts that have been computed. All that were reserved are committed together."""
        for node in self._reserved:
            node.pins, node.is_extended = 0, False
        self._reserved.clear()
        for reservation in reservations:
            self._add(reservation)

    def _match(self, ids: np.ndarray) -> tuple[list[_Node], int]:
        """Returns the pages with the most first tokens of `ids`, and the number of tokens."""
        path, at, node = list[_Node](), 0, self._root
        while at < len(ids):
            child, common = node.best(ids[at : at + PAGE])
            if child is None or not common:
                break
            path.append(child)
            at, node = at + common, child
            if common < PAGE:
                break
        return path, at

    def _take(self, count: int) -> list[int] | None:
        """Returns the numbers of free pages; None if there are fewer."""
        numbers = list[int]()
        while len(numbers) < count:
            if not self._free:
                oldest = next((node for node in self._uses if not node.pins), None)
                if oldest is None:
                    self._free += numbers[::-1]
                    return None
                self._forget(oldest)
            numbers.append(self._free.pop())
        return numbers

    def _add(self, reservation: Reservation) -> None:
        """Adds the pages of a context to the tree."""
        path, parent = list[_Node](), self._root
        for i, number in enumerate(reservation.pages):
            ids = reservation.ids[i * PAGE : (i + 1) * PAGE]
            node = self._nodes.get(number)
            if node is None:
                node = self._put(number, parent, ids)
            elif len(ids) > len(node.ids):
                del parent.children[node.ids.tobytes()]
                node.ids, parent.children[ids.tobytes()] = ids, node
            path.append(node)
            parent = node
        self._use(path)

    def _put(self, number: int, parent: _Node, ids: np.ndarray) -> _Node:
        """Adds a page; returns another one if that has the same tokens after the same ones."""
        equal = parent.children.get(ids.tobytes())
        if equal is not None:
            # Two contexts of one wave have a page in common, and each has computed it.
            self._free.append(number)
            return equal
        node = _Node(number, parent, ids)
        parent.children[ids.tobytes()] = self._nodes[number] = node
        return node

    def _use(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._uses[node] = None
            self._uses.move_to_end(node)

    def _forget(self, node: _Node) -> None:
        assert node.parent is not None and not node.children, "the last page of its context"
        del node.parent.children[node.ids.tobytes()], self._nodes[node.number], self._uses[node]
        self._free.append(node.number)


def _must_copy(node: _Node, ids: np.ndarray, start: int) -> bool:
    """Returns whether a context must copy the page that has its last known tokens.

    Args:
      node: the page.
      ids: int32 tokens of the context.
      start: known tokens.
    """
    if start == len(ids) or start % PAGE == 0:
        return False  # the page is shared
    # Tokens of another context follow in the page, or will.
    return node.is_extended or (start - 1) % PAGE + 1 < len(node.ids)


def page_count(tokens: int) -> int:
    """Returns the number of pages that hold a number of tokens."""
    return -(-tokens // PAGE)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of first tokens that two contexts have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
