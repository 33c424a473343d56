"""Trees of rollouts for the report: nested nodes, colors of credit, and a drawing.

Nodes are the mappings that `rollout.trace.trees` writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from jax_ragrl.report.load import is_number
from jax_ragrl.report.svg import element, svg, text

LEVEL_WIDTH, ROW_HEIGHT, RADIUS = 104, 34, 8  # pixels
MAX_NAME = 24  # letters


@dataclasses.dataclass
class TreeNode:
    """A node and its children. `level` counts from the root (1), `row` from the top (0)."""

    record: Mapping[str, Any]
    children: list[TreeNode] = dataclasses.field(default_factory=list)
    level: int = 1
    row: float = 0.0

    @property
    def is_leaf(self) -> bool:
        return self.record.get("role") == "leaf"

    def walk(self) -> Iterator[TreeNode]:
        """The node and its descendants, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


class Scale(NamedTuple):
    """The range of credit that the colors span: `low` is fully bad, `high` fully good."""

    low: float = 0.0
    high: float = 1.0

    def tint(self, credit: Any) -> tuple[str, int]:
        """The side of the middle (`good`, `bad` or `none`) and the color strength in percent."""
        if not is_number(credit):
            return "none", 0
        share = 2 * (float(credit) - self.low) / (self.high - self.low) - 1
        return ("good" if share >= 0 else "bad"), round(100 * min(abs(share), 1.0))


def credit_scale(trees: Sequence[Mapping[str, Any]]) -> Scale:
    """The scale of all credit: 0 to 1 or wider, symmetric if some credit is negative."""
    nodes = [node for tree in trees for node in tree.get("nodes", ())]
    credit = [node["credit"] for node in nodes if is_number(node.get("credit"))]
    # Negative credit is an advantage, whose neutral value is 0: it gets the neutral color.
    if min(credit, default=0.0) < 0:
        limit = max(1.0, *map(abs, credit))
        return Scale(-limit, limit)
    return Scale(0.0, max([1.0, *credit]))


def build_tree(records: Sequence[Mapping[str, Any]]) -> list[TreeNode]:
    """The roots of nodes that refer to their parents; a node with an unknown parent is a root."""
    nodes = {record.get("id"): TreeNode(record) for record in records}
    roots: list[TreeNode] = []
    for node in nodes.values():
        parent = nodes.get(node.record.get("parent"))
        # A damaged file may name a node as its own parent, which must not become a cycle.
        (roots if parent is None or parent is node else parent.children).append(node)
    rows = iter(range(len(nodes)))
    for root in roots:
        _place(root, 1, rows)
    return roots


def _place(node: TreeNode, level: int, rows: Iterator[int]) -> None:
    """Puts a node without children into the next free row, any other between its children."""
    node.level = level
    for child in node.children:
        _place(child, level + 1, rows)
    children = [child.row for child in node.children]
    node.row = (children[0] + children[-1]) / 2 if children else float(next(rows))


def draw_tree(roots: Sequence[TreeNode], scale: Scale, anchor: str) -> Markup:
    """Draws a tree from left to right: actions as circles, leaves as squares, credit as color."""
    nodes = [node for root in roots for node in root.walk()]
    if not nodes:
        return Markup("")
    rows = 1 + max(node.row for node in nodes)
    start = (20.0, 26 + ROW_HEIGHT * (roots[0].row + roots[-1].row) / 2)
    edges = [_edge(start, _position(root)) for root in roots]
    edges += [_edge(_position(n), _position(child)) for n in nodes for child in n.children]
    origin = element("circle", cx=start[0], cy=start[1], r=4, class_="origin")
    width = 40 + LEVEL_WIDTH * max(node.level for node in nodes) + 7 * MAX_NAME
    marks = [_mark(node, scale, anchor) for node in nodes]
    return svg(width, 44 + ROW_HEIGHT * (rows - 1), "the tree", *edges, origin, *marks)


def _position(node: TreeNode) -> tuple[float, float]:
    return 20.0 + LEVEL_WIDTH * node.level, 26 + ROW_HEIGHT * node.row


def _edge(a: tuple[float, float], b: tuple[float, float]) -> Markup:
    # A Bezier curve that leaves and enters horizontally.
    middle = (a[0] + b[0]) / 2
    curve = f"M{a[0]:g},{a[1]:g}C{middle:g},{a[1]:g} {middle:g},{b[1]:g} {b[0]:g},{b[1]:g}"
    return element("path", d=curve, class_="edge")


def _mark(node: TreeNode, scale: Scale, anchor: str) -> Markup:
    """A node's shape with a tooltip, which links to the node's text, and its label."""
    record, (x, y) = node.record, _position(node)
    side, strength = scale.tint(record.get("credit"))
    title = element("title", caption(record))
    style = {"class_": f"mark {side}", "style": f"--w:{strength}%"}
    if node.is_leaf:
        r, answer = RADIUS - 1, record.get("answer")
        shape = element("rect", title, x=x - r, y=y - r, width=2 * r, height=2 * r, rx=3, **style)
        name = str(record.get("why") or "no answer") if answer is None else str(answer)
        short = name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
        class_ = "tick failed" if answer is None else "tick output"
        label = text(x + RADIUS + 6, y + 4, short, class_=class_)
    else:
        shape = element("circle", title, cx=x, cy=y, r=RADIUS, **style)
        label = text(x, y - RADIUS - 5, str(record.get("role")), "middle")
    return element("a", shape + label, href=f"#{anchor}-{record.get('id')}")


def caption(record: Mapping[str, Any]) -> str:
    """One line about a node."""
    credit = record.get("credit")
    value = f"{credit:.2f}" if is_number(credit) else "none"
    output = record.get("answer") or record.get("text") or record.get("why") or ""
    return f"{record.get('role')} · credit {value} · {' '.join(str(output).split())[:120]}"
