"""A forest as JSON for reports, a rollout as text: what was written, chosen and earned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Action, Call, Forest, Record
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Passage

# The roles that choose among candidates: their nodes show these, and which were kept. In a forest
# without any, nodes show what was found right after them.
READERS = ("filter", "selector")


def trees(
    forest: Forest,
    credit_N: Any,
    limit: int,
    *,
    tokenizer: ChatTokenizer | None = None,
) -> list[dict[str, Any]]:
    """The trees of the first `limit` questions as values that `json.dumps` takes.

    Args:
      forest: any forest of `rollout.collect`.
      credit_N: float credit of every node `[N]`; nan where no leaf was reached becomes null.
      limit: how many questions at most; those whose effects failed are skipped.
      tokenizer: adds each action's prompt and its tokens with their log-probabilities.

    Returns:
      One `{"question", "answers", "hops", "nodes"}` a question. A node has `id` and `parent` (node
      numbers of the forest; null at a root) and the fields of `_node`; a leaf also the `calls` to
      the environment on its way, pairs of a purpose and what came of it.
    """
    credit_N = np.asarray(credit_N, np.float64)
    if credit_N.shape != forest.parent_N.shape:
        raise ValueError(
            f"credit {credit_N.shape} is not one number a node {forest.parent_N.shape}"
        )
    shown = [i for i in range(len(forest.questions)) if i not in forest.failed][:limit]
    return [_tree(forest, question, credit_N, tokenizer) for question in shown]


def _tree(
    forest: Forest, number: int, credit_N: np.ndarray, tokenizer: ChatTokenizer | None
) -> dict[str, Any]:
    question = forest.questions[number]
    choosing = any(record.role in READERS for record in forest.records)
    nodes = []
    for n in forest.nodes_of(number).tolist():
        record = forest.records[n]
        node = {"id": n, "parent": None if record.parent == NO_PARENT else record.parent}
        node |= _node(record, _finite(credit_N[n]))
        node["reward"] = _finite(forest.reward_N[n]) if record.role == LEAF else None
        node["passages"] = _passages(record, choosing)
        if record.calls:
            node["calls"] = [[call.purpose, _told(call)] for call in record.calls]
        if tokenizer is not None and record.action is not None:
            node |= _written(record.action, tokenizer)
        nodes.append(node)
    return {
        "question": question.text,
        "answers": list(question.answers),
        "hops": question.hops,
        "nodes": nodes,
    }


def _node(record: Record, credit: float | None) -> dict[str, Any]:
    """What a record tells by itself. `why` is the fault of an action or the end of a leaf."""
    action = record.action
    return {
        "role": record.role,
        "depth": record.depth,
        "text": action.text if action else "",
        "prompt": "",
        "forced": record.forced,
        "multiplicity": record.multiplicity,
        "credit": credit,
        "answer": record.answer,
        "why": record.why or (action.error if action else ""),
    }


def _passages(record: Record, choosing: bool) -> list[dict[str, Any]]:
    """A reader's candidates, those kept that are among its documents; else what was found."""
    if not choosing:
        return [{"title": p.title, "text": p.text} for p in record.found]
    if record.role not in READERS:
        return []
    candidates: Sequence[Passage] = getattr(record.state, "candidates", ())
    documents = set(getattr(record.state, "documents", ()))
    return [{"title": p.title, "text": p.text, "kept": p in documents} for p in candidates]


def _written(action: Action, tokenizer: ChatTokenizer) -> Mapping[str, Any]:
    """The prompt as text, and the tokens; what was not sampled has no log-probabilities."""
    logps = action.logps or [None] * len(action.ids)
    tokens = [
        [tokenizer.decode([i]), None if p is None else _finite(p)]
        for i, p in zip(action.ids, logps, strict=True)
    ]
    return {"prompt": tokenizer.decode(action.prompt_ids), "tokens": tokens}


def transcript(forest: Forest, question: int) -> str:
    """An unbranched rollout of one question as text: each action, search and reply in order."""
    records = [forest.records[n] for n in forest.nodes_of(question)]
    if not records:
        return f"{forest.questions[question].text}\n(the environment failed)"
    leaf = records[-1]
    events = [(r.round, 0, r.role, r.action.text) for r in records if r.action is not None]
    events += [(call.round, 1, call.purpose, _told(call)) for call in leaf.calls]
    lines = [_line(name, text) for _, _, name, text in sorted(events, key=lambda e: e[:2])]
    lines.append(_line("=>", f"{leaf.answer} ({leaf.why})"))
    return "\n".join([forest.questions[question].text, *lines])


def _told(call: Call) -> str:
    """What a call brought: a reply, or the titles that a query found."""
    titles = ", ".join(passage.title for passage in call.found)
    return f"{call.asked} -> {titles}" if call.purpose == "search" else call.told


def _line(name: str, text: str) -> str:
    return f"  {name:<12} " + text.strip().replace("\n", "\n" + " " * 15)


def _finite(x: float) -> float | None:
    """JSON has no nan."""
    return round(float(x), 6) if math.isfinite(x) else None
