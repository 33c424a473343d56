"""A forest as JSON for reports, a rollout as text: what was written, chosen and earned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.rollout.tree import LEAF, NO_PARENT, SEARCH, Action, Call, Forest, Record
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
        "text": _text(record),
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
    text = forest.questions[question].text
    if question in forest.failed:
        return f"{text}\n(the environment failed: {failure(forest, question)})"
    lines = [
        _line(e.purpose, _told(e)) if isinstance(e, Call) else _line(e.role, _text(e))
        for e in _events(forest, question)
    ]
    leaf = end(forest, question)
    return "\n".join([text, *lines, _line("=>", f"{leaf.answer} ({leaf.why})")])


def steps(forest: Forest, question: int) -> list[dict[str, Any]]:
    """An unbranched rollout of one question in order, as values that `json.dumps` takes.

    Each step has its `round` and a `role`: that of an action, `search`, or the purpose of a call to
    the frozen language model.
    """
    return [
        {"round": e.round, **(_called(e) if isinstance(e, Call) else _acted(e))}
        for e in _events(forest, question)
    ]


def end(forest: Forest, question: int) -> Record:
    """The leaf of an unbranched rollout of a question whose environment did not fail."""
    return forest.records[forest.nodes_of(question)[-1]]


def failure(forest: Forest, question: int) -> str:
    """What the environment said of a question that failed."""
    return forest.failures[forest.failed.index(question)]


def _events(forest: Forest, question: int) -> list[Record | Call]:
    """The actions and calls of an unbranched rollout; in a round, the actions come first."""
    records = [forest.records[n] for n in forest.nodes_of(question)]
    events: list[Record | Call] = [r for r in records if r.action is not None]
    return sorted([*events, *end(forest, question).calls], key=lambda event: event.round)


def _acted(record: Record) -> dict[str, Any]:
    action = record.parsed.action if record.parsed else ""
    return {"role": record.role, "action": action, "text": _text(record), "fault": record.fault}


def _called(call: Call) -> dict[str, Any]:
    if call.purpose == SEARCH:
        passages = [{"id": p.id, "title": p.title} for p in call.found]
        return {"role": SEARCH, "query": call.asked, "passages": passages}
    return {"role": call.purpose, "prompt": call.asked, "reply": call.told}


def _text(record: Record) -> str:
    return record.action.text if record.action else ""


def _told(call: Call) -> str:
    """What a call brought: a reply, or the titles that a query found."""
    titles = ", ".join(passage.title for passage in call.found)
    return f"{call.asked} -> {titles}" if call.purpose == SEARCH else call.told


def _line(name: str, text: str) -> str:
    return f"  {name:<12} " + text.strip().replace("\n", "\n" + " " * 15)


def _finite(x: float) -> float | None:
    """JSON has no nan."""
    return round(float(x), 6) if math.isfinite(x) else None
