"""OPERA's trajectory memory: a finished rollout as an ordered log of events.

The paper's component writes every event down as it happens, and nothing reads it. Here a rollout's
records and calls hold all of it, and the log is a view of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.systems.base import path_to
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE


class Event(NamedTuple):
    """An entry of the log: when (batched calls before it), what, by whom, and its details."""

    round: int
    kind: str
    component: str
    details: Mapping[str, Any]


def trajectory(forest: Forest, leaf: int) -> list[Event]:
    """Every event of the rollout that ended in a leaf, in order.

    Kinds: plan, retrieval, decision, rewrite, step (an outcome), final.
    """
    *path, end = path_to(forest, leaf)
    events = [
        Event(call.round, "retrieval", "search", {"query": call.asked, "found": call.found})
        for call in end.calls
    ]
    over: tuple[str, ...] = ()
    for record in path:
        events.append(_event(record))
        for number in range(len(over) + 1, len(record.state.answers) + 1):
            outcome = {"number": number, "answer": record.state.answers[number - 1]}
            events.append(Event(record.round, "step", "orchestrator", outcome))
        over = record.state.answers
    final = Event(end.round, "final", "orchestrator", {"answer": end.answer, "why": end.why})
    return sorted([*events, final], key=lambda event: event.round)


def _event(record: Record) -> Event:
    """What one action of a role did."""
    parsed, state = record.parsed, record.state
    assert parsed is not None
    if record.role == PLAN:
        details: dict[str, Any] = {"steps": [step.goal for step in state.steps]}
    elif record.role == ANALYSIS:
        answer = parsed.args[0] if parsed.args else ""
        details = {"goal": state.judged.text, "status": parsed.action, "answer": answer}
        details["analysis"] = parsed.thought
    else:
        details = {"goal": state.goal, "query": state.query, "strategy": parsed.thought}
    kinds = {PLAN: "plan", ANALYSIS: "decision", REWRITE: "rewrite"}
    fault = {"fault": parsed.error} if parsed.error else {}
    return Event(record.round, kinds[record.role], record.role, details | fault)
