"""One tree of rollouts, prepared for the page: nested nodes, colours of credit, a small drawing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from jax_ragrl.report.load import is_number
from jax_ragrl.report.svg import element, joined, svg, text

STEP, ROW, RADIUS, NAME = 104, 34, 8, 24  # pixels; NAME is in letters


@dataclasses.dataclass
class Twig:
    """A node with those below it. `row` is its place from the top in the drawing."""

    node: Mapping[str, Any]
    children: list[Twig] = dataclasses.field(default_factory=list)
    level: int = 1
    row: float = 0.0

    @property
    def is_leaf(self) -> bool:
        return self.node.get("role") == "leaf"

    def walk(self) -> Iterator[Twig]:
        """This twig and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


class Scale(NamedTuple):
    """The range of credit that the colours span: `low` is all bad, `high` all good."""

    low: float = 0.0
    high: float = 1.0

    def tint(self, credit: Any) -> tuple[str, int]:
        """The side of the middle (`good`, `bad` or `none`) and the strength in percent."""
        if not is_number(credit):
            return "none", 0
        share = 2 * (float(credit) - self.low) / (self.high - self.low) - 1
        return ("good" if share >= 0 else "bad"), round(100 * min(abs(share), 1.0))


def scale_of(trees: Sequence[Mapping[str, Any]]) -> Scale:
    """0 to 1, or wider; where some credit is negative, as advantages are, 0 is in the middle."""
    seen = [n["credit"] for t in trees for n in t.get("nodes", ()) if is_number(n.get("credit"))]
    if min(seen, default=0.0) < 0:
        most = max(1.0, *map(abs, seen))
        return Scale(-most, most)
    return Scale(0.0, max([1.0, *seen]))


def grow(nodes: Sequence[Mapping[str, Any]]) -> list[Twig]:
    """The roots of a tree whose nodes name their parents; an unknown parent makes a root."""
    twigs = {node.get("id"): Twig(node) for node in nodes}
    roots: list[Twig] = []
    for twig in twigs.values():
        parent = twigs.get(twig.node.get("parent"))
        (roots if parent is None or parent is twig else parent.children).append(twig)
    rows = iter(range(len(twigs)))
    for root in roots:
        _place(root, 1, rows)
    return roots


def _place(twig: Twig, level: int, rows: Iterator[int]) -> None:
    """Ends take the next free row, the others the middle of their children."""
    twig.level = level
    for child in twig.children:
        _place(child, level + 1, rows)
    ends = [child.row for child in twig.children]
    twig.row = (ends[0] + ends[-1]) / 2 if ends else float(next(rows))


def sketch(roots: Sequence[Twig], scale: Scale, anchor: str) -> Markup:
    """The tree from left to right: circles are actions, squares leaves, colour is credit."""
    twigs = [twig for root in roots for twig in root.walk()]
    if not twigs:
        return Markup("")
    rows = 1 + max(twig.row for twig in twigs)
    start = (20.0, 26 + ROW * (roots[0].row + roots[-1].row) / 2)
    edges = [_edge(start, _at(root)) for root in roots]
    edges += [_edge(_at(t), _at(child)) for t in twigs for child in t.children]
    origin = element("circle", cx=start[0], cy=start[1], r=4, class_="origin")
    width = 40 + STEP * max(twig.level for twig in twigs) + 7 * NAME
    marks = [_mark(twig, scale, anchor) for twig in twigs]
    return svg(width, 44 + ROW * (rows - 1), "the tree", *edges, origin, *marks)


def _at(twig: Twig) -> tuple[float, float]:
    return 20.0 + STEP * twig.level, 26 + ROW * twig.row


def _edge(a: tuple[float, float], b: tuple[float, float]) -> Markup:
    middle = (a[0] + b[0]) / 2
    curve = f"M{a[0]:g},{a[1]:g}C{middle:g},{a[1]:g} {middle:g},{b[1]:g} {b[0]:g},{b[1]:g}"
    return element("path", d=curve, class_="edge")


def _mark(twig: Twig, scale: Scale, anchor: str) -> Markup:
    """A node's shape; hovering tells what it is, a click leads to its text."""
    (x, y), (side, strength) = _at(twig), scale.tint(twig.node.get("credit"))
    title = element("title", caption(twig.node))
    style = {"class_": f"mark {side}", "style": f"--w:{strength}%"}
    if twig.is_leaf:
        r = RADIUS - 1
        shape = element("rect", title, x=x - r, y=y - r, width=2 * r, height=2 * r, rx=3, **style)
    else:
        shape = element("circle", title, cx=x, cy=y, r=RADIUS, **style)
    parts = [shape, *_names(twig, x, y)]
    return element("a", joined(parts), href=f"#{anchor}-{twig.node.get('id')}")


def _names(twig: Twig, x: float, y: float) -> list[Markup]:
    """A leaf's answer beside it, an action's role above it."""
    node = twig.node
    if not twig.is_leaf:
        return [text(x, y - RADIUS - 5, str(node.get("role")), "middle")]
    dead = node.get("answer") is None
    name = str(node.get("why") or "dead") if dead else str(node.get("answer"))
    short = name if len(name) <= NAME else name[: NAME - 1] + "…"
    return [text(x + RADIUS + 6, y + 4, short, "start", "tick dead" if dead else "tick said")]


def caption(node: Mapping[str, Any]) -> str:
    """One line about a node."""
    credit = node.get("credit")
    value = f"{credit:.2f}" if is_number(credit) else "none"
    said = node.get("answer") or node.get("text") or node.get("why") or ""
    return f"{node.get('role')} · credit {value} · {' '.join(str(said).split())[:120]}"
