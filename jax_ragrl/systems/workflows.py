"""Workflows as MAO-ARAG's planner writes them: a comma list of executors.

QDS  serial decomposition     QR  query rewriter     DS  document selector
QDP  parallel decomposition   R   retriever          AG  answer generator
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence

from jax_ragrl.rollout.roles import Parsed, malformed

QDS, QDP, QR, R, DS, AG = "QDS", "QDP", "QR", "R", "DS", "AG"

# How planners write the executors, in any case; what is not here is unknown.
SPELLINGS = {
    QDS: "qds|query decomposition serial|serial query decomposition|serial decomposition"
    "|decompose serially|serial",
    QDP: "qdp|query decomposition parallel|parallel query decomposition|parallel decomposition"
    "|decompose in parallel|parallel",
    QR: "qr|query rewriter|query rewriting|query rewrite|query reformulation|rewriter|rewrite",
    R: "r|ra|retrieval agent|retriever|retrieval|retrieve|search",
    DS: "ds|document selector|document selection|selector|select",
    AG: "ag|answer generator|answer generation|generator|generate|answer",
}
EXECUTORS = tuple(SPELLINGS)
NAMES: Mapping[str, str] = {
    spelling: name for name, line in SPELLINGS.items() for spelling in line.split("|")
}

WORKFLOWS = tuple(
    (*order, AG) for n in range(4) for order in itertools.permutations((QR, R, DS), n)
)


def parse_plan(
    text: str,
    *,
    first: bool,
    select_needs_search: bool = False,
    executors: Collection[str] = EXECUTORS,
) -> Parsed:
    """`QR,R,DS,AG`: a workflow; `QDS` or `QDP` alone, where the plan is the first.

    An executor that is not among `executors` is as unknown as any other word.
    """
    listed = re.sub(r"^\s*workflow\s*:", "", text, flags=re.IGNORECASE)
    items = [item.strip(" \t\r\n.`'\"").lower() for item in re.split(r",|\band\b", listed)]
    named = [item for item in items if item]
    if not named:
        return malformed("Empty Workflow")
    if any(NAMES.get(item) not in executors for item in named):
        return malformed("Unknown Executor")
    plan = tuple(NAMES[item] for item in named)
    fault = _fault(plan, first, select_needs_search)
    return malformed(fault) if fault else Parsed("Plan", plan)


def _fault(plan: tuple[str, ...], first: bool, select_needs_search: bool) -> str:
    """What is illegal about a list of known executors; empty where nothing is."""
    if plan in ((QDS,), (QDP,)):
        return "" if first else "Decomposed Twice"
    if QDS in plan or QDP in plan:
        return "Decomposition Not Alone"
    if len(set(plan)) < len(plan):
        return "Repeated Executor"
    if plan[-1] != AG:
        return "No Answer At The End"
    if select_needs_search and DS in plan and R not in plan[: plan.index(DS)]:
        return "Nothing To Select From"
    return ""


def render_plan(plan: Sequence[str]) -> str:
    """The planner's text for a workflow."""
    return ",".join(plan)
