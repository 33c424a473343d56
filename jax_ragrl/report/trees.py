"""Stored trees of a run, the informative ones first, and their compact form for the explorer.

A policy gradient needs decisions whose outcomes differ, so a tree whose leaves have different
rewards says more than one whose leaves agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_ragrl.report.load import is_number

# The defaults of the fields of a node, which its compact form leaves out.
NODE: Mapping[str, Any] = {
    "id": None, "parent": None, "role": "", "text": "", "prompt": "", "forced": False,
    "multiplicity": 1, "credit": None, "reward": None, "answer": None, "why": "", "passages": (),
    "tokens": (), "calls": (),
}  # fmt: skip
NODE_FIELDS = ("id", "parent", "role", "forced", "multiplicity", "credit", "reward", "why")
LEAF = "leaf"


def stored_trees(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns all trees of `trees.jsonl`, the informative ones first, see `spread`.

    Of equal ones the latest is first: it shows the trained system. Each tree has its `step`, and
    all fields of its nodes.
    """
    # The step is known to the row only.
    trees = [{**tree, "step": row["step"]} for row in rows for tree in row.get("trees") or ()]
    trees = [
        tree | {"nodes": [{**NODE, **node} for node in tree.get("nodes", ())]} for tree in trees
    ]
    return sorted(trees, key=lambda tree: (-spread(tree), -tree["step"]))


def spread(tree: Mapping[str, Any]) -> float:
    """Computes the largest minus the smallest reward of the leaves; 0 without leaves."""
    values = rewards(tree)
    return max(values, default=0.0) - min(values, default=0.0)


def rewards(tree: Mapping[str, Any]) -> list[float]:
    """Returns the rewards of the leaves that have one."""
    leaves = (node for node in tree["nodes"] if node["role"] == LEAF)
    return [float(node["reward"]) for node in leaves if is_number(node["reward"])]


def largest_credit(tree: Mapping[str, Any]) -> float:
    """Computes the largest absolute credit of a decision; 0 if no decision has credit."""
    decisions = (node for node in tree["nodes"] if node["role"] != LEAF)
    return max((abs(n["credit"]) for n in decisions if is_number(n["credit"])), default=0.0)


class Numbers(dict[Any, int]):
    """Numbers of distinct values, in order of their first occurrence."""

    def __missing__(self, value: Any) -> int:
        self[value] = len(self)
        return self[value]


def shorten(text: str, limit: int) -> str:
    """Returns a text with its end cut off if it is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]} …"


def compact_tree(
    tree: Mapping[str, Any], source: int, texts: Numbers, passages: Numbers, limit: int
) -> dict[str, Any]:
    """Returns a tree for the explorer, whose prompts and passages are numbers in tables.

    Siblings share their prompt, and searches their passages. Both tables are extended; texts are
    cut to `limit` characters.
    """
    facts = {name: tree.get(name) for name in ("question", "answers", "hops", "step")}
    return facts | {
        "source": source,
        "spread": spread(tree),
        "credit": largest_credit(tree),
        "nodes": [_compact_node(node, texts, passages, limit) for node in tree["nodes"]],
    }


def _compact_node(
    node: Mapping[str, Any], texts: Numbers, passages: Numbers, limit: int
) -> dict[str, Any]:
    """The fields of a node that differ from their defaults, with numbers for texts."""
    # Most fields of most nodes have the default, which the page need not repeat.
    values = {name: node[name] for name in NODE_FIELDS if node[name] != NODE[name]}
    values |= {name: shorten(node[name], limit) for name in ("text", "answer") if node[name]}
    if node["prompt"]:
        values["prompt"] = texts[shorten(node["prompt"], limit)]
    # Trees store no ids of passages.
    if pages := node["passages"]:
        values["passages"] = [passages["", p["title"], shorten(p["text"], limit)] for p in pages]
        values["kept"] = [p.get("kept") for p in pages]
    # Replies of the frozen model and titles of searches on the way to a leaf.
    if node["calls"]:
        values["calls"] = [[purpose, shorten(str(x), limit)] for purpose, x in node["calls"]]
    return values
