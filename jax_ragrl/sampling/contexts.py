"""A tree of the contexts whose keys and values a device keeps: what a prompt need not compute.

Contexts are kept in pages of `PAGE` tokens. Contexts that begin equally share the pages of their
beginning, so the instructions of a role and the past of a conversation are held once:

    instructions of a role -+- question 1 -+- reply a
                            |              +- reply b - observation
                            +- question 2

A context is found by its tokens alone. The tokens after its last full page are computed again. When
room is needed, the page that was used longest ago is given up, the last one of a context first.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

PAGE = 16  # tokens per page


@dataclasses.dataclass(eq=False)
class _Page:
    """A page of the tree: a number, -1 for the root, the bytes of its tokens, and what follows."""

    number: int
    parent: _Page | None = None
    ids: bytes = b""
    children: dict[bytes, _Page] = dataclasses.field(default_factory=dict)


class KeptContexts:
    def __init__(self, pages: int) -> None:
        self._root = _Page(-1)
        self._free = [*range(pages)][::-1]
        # Pages by their last use. A page is used after those that follow it, so the page that was
        # used longest ago is the last one of its context.
        self._uses = OrderedDict[_Page, None]()
        self._pinned = set[_Page]()

    def match(self, ids: np.ndarray) -> list[int]:
        """Returns the pages with the most first tokens of a context, and pins them.

        At least one token is left to be run: its logits are not kept.
        """
        path = self._path(ids[:-1])
        self._use(path)
        return [page.number for page in path]

    def add(self, ids: np.ndarray) -> dict[int, int]:
        """Adds a context, as far as there is room, and pins its pages.

        Returns the numbers of the pages that must be written, by their places in the context.
        """
        path, new = self._path(ids), dict[int, int]()
        self._use(path)
        for key in [*_full_pages(ids)][len(path) :]:
            number = self._take()
            if number is None:
                break
            parent = path[-1] if path else self._root
            page = parent.children[key] = _Page(number, parent, key)
            new[len(path)] = number
            path.append(page)
            self._pinned.add(page)
        self._use(path)
        return new

    def release(self) -> None:
        self._pinned.clear()

    def _path(self, ids: np.ndarray) -> list[_Page]:
        path, page = list[_Page](), self._root
        for key in _full_pages(ids):
            if key not in page.children:
                break
            page = page.children[key]
            path.append(page)
        return path

    def _use(self, path: list[_Page]) -> None:
        for page in reversed(path):
            self._uses[page] = None
            self._uses.move_to_end(page)
        self._pinned.update(path)

    def _take(self) -> int | None:
        if not self._free:
            oldest = next((page for page in self._uses if page not in self._pinned), None)
            if oldest is None:
                return None
            assert oldest.parent is not None and not oldest.children, "the last one of its context"
            del oldest.parent.children[oldest.ids], self._uses[oldest]
            self._free.append(oldest.number)
        return self._free.pop()


def _full_pages(ids: np.ndarray) -> Iterator[bytes]:
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        yield ids[start : start + PAGE].tobytes()


def page_count(tokens: int) -> int:
    return -(-tokens // PAGE)
