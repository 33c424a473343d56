"""Forests as JSON for the report, and single rollouts as text or JSON."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from jax_ragrl.rollout.tree import LEAF, NO_PARENT, SEARCH, Call, Forest, Record
from jax_ragrl.text.tokenizer import ChatTokenizer


def trees(
    forest: Forest,
    credit_N: Any,
    limit: int,
    *,
    choosers: Collection[str] = (),
    tokenizer: ChatTokenizer | None = None,
) -> list[dict[str, Any]]:
    """Returns the trees of the first `limit` questions as JSON values; failed ones are skipped.

    One `{"question", "answers", "hops", "nodes"}` per question. `id` and `parent` of a node are
    node numbers of the forest (null above a root), and a credit of nan (no leaf was reached) is
    null. A leaf also has the `calls` on the path to it, pairs of a purpose and a result.

    Args:
      choosers: the roles that choose among passages (`Role.chooses`). Their nodes show these and
        mark the chosen ones; in a forest without such roles, a node shows what it searched for.
      tokenizer: if given, each action has its prompt, and its tokens with their log-probabilities.
    """
    credit_N = np.asarray(credit_N, np.float64)
    # A wrong shape would silently show the credit of other nodes.
    if credit_N.shape != forest.parent_N.shape:
        raise ValueError(
            f"credit {credit_N.shape} must have one number per node {forest.parent_N.shape}"
        )
    numbers = [i for i in range(len(forest.questions)) if i not in forest.failed_questions]
    some_choose = any(record.role in choosers for record in forest.records)
    result = []
    for number in numbers[:limit]:
        question, nodes = forest.questions[number], []
        for n in forest.nodes_of(number).tolist():
            record = forest.records[n]
            action = record.action
            node = {
                "id": n,
                "parent": None if record.parent == NO_PARENT else record.parent,
                "role": record.role,
                "depth": record.depth,
                "text": _text(record),
                "prompt": "",
                "forced": record.is_forced,
                "multiplicity": record.multiplicity,
                "credit": _finite(credit_N[n]),
                "answer": record.answer,
                "why": record.finish_reason or (action.error if action else ""),
                # Actions may have rewards too, but the report shows only the leaves' own.
                "reward": _finite(forest.reward_N[n]) if record.role == LEAF else None,
                "passages": [],
            }
            if record.role in choosers:
                # The documents of the state after the action include the chosen candidates.
                kept = set(record.state.documents)
                node["passages"] = [
                    {"title": p.title, "text": p.text, "kept": p in kept}
                    for p in record.state.candidates
                ]
            elif not some_choose:
                node["passages"] = [{"title": p.title, "text": p.text} for p in record.passages]
            if record.calls:
                node["calls"] = [[call.purpose, _result(call)] for call in record.calls]
            if tokenizer is not None and action is not None:
                node["prompt"] = tokenizer.decode(action.prompt_ids)
                # A forced action has no log-probabilities, but its tokens are shown all the same.
                logps = action.logps or [None] * len(action.ids)
                node["tokens"] = [
                    [tokenizer.decode([i]), None if p is None else _finite(p)]
                    for i, p in zip(action.ids, logps, strict=True)
                ]
            nodes.append(node)
        about = {"question": question.text, "answers": [*question.answers], "hops": question.hops}
        result.append({**about, "nodes": nodes})
    return result


def transcript(forest: Forest, question: int) -> str:
    """Returns an unbranched rollout of one question as text: actions, searches and replies."""
    text = forest.questions[question].text
    if question in forest.failed_questions:
        return f"{text}\n(the environment failed: {failure_of(forest, question)})"
    lines = [
        _line(e.purpose, _result(e)) if isinstance(e, Call) else _line(e.role, _text(e))
        for e in _events(forest, question)
    ]
    leaf = final_leaf(forest, question)
    return "\n".join([text, *lines, _line("=>", f"{leaf.answer} ({leaf.finish_reason})")])


def transcript_steps(forest: Forest, question: int) -> list[dict[str, Any]]:
    """Returns an unbranched rollout of one question as JSON values, in order.

    Each step has its `round` and a `role`: the role of an action, `search`, or the purpose of a
    call to the frozen language model.
    """
    steps, step = list[dict[str, Any]](), dict[str, Any]()
    for e in _events(forest, question):
        if isinstance(e, Record):
            action = e.parsed.action if e.parsed else ""
            step = {"role": e.role, "action": action, "text": _text(e), "fault": e.parse_error}
        elif e.purpose == SEARCH:
            passages = [{"id": p.id, "title": p.title} for p in e.passages]
            step = {"role": SEARCH, "query": e.request, "passages": passages}
        else:
            step = {"role": e.purpose, "prompt": e.request, "reply": e.reply}
        steps.append({"round": e.round, **step})
    return steps


def final_leaf(forest: Forest, question: int) -> Record:
    """Returns the leaf of an unbranched rollout of a question that did not fail."""
    return forest.records[forest.nodes_of(question)[-1]]


def failure_of(forest: Forest, question: int) -> str:
    """Returns the error message of a failed question."""
    return forest.failures[forest.failed_questions.index(question)]


def _events(forest: Forest, question: int) -> list[Record | Call]:
    """The actions and calls of an unbranched rollout; within a round, actions come first."""
    records = [forest.records[n] for n in forest.nodes_of(question)]
    events: list[Record | Call] = [r for r in records if r.action is not None]
    # The sort is stable, so actions stay before the calls of their round.
    return sorted([*events, *final_leaf(forest, question).calls], key=lambda event: event.round)


def _text(record: Record) -> str:
    return record.action.text if record.action else ""


def _result(call: Call) -> str:
    """The reply of the language model, or the query with the titles of its passages."""
    titles = ", ".join(passage.title for passage in call.passages)
    return f"{call.request} -> {titles}" if call.purpose == SEARCH else call.reply


def _line(name: str, text: str) -> str:
    return f"  {name:<12} " + text.strip().replace("\n", "\n" + " " * 15)


def _finite(x: float) -> float | None:
    """Replaces nan and infinities, which JSON does not have, by None."""
    return round(float(x), 6) if math.isfinite(x) else None
