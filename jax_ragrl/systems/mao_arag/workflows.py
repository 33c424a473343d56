"""Workflows in the form that MAO-ARAG's planner writes: comma-separated lists of executors.

QDS  serial decomposition     QR  query rewriter     DS  document selector
QDP  parallel decomposition   R   retriever          AG  answer generator
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence

from jax_ragrl.rollout.roles import ParsedAction, invalid_action

# The planner's roles before and after its first legal plan.
PLANNER, SUB_PLANNER = "planner", "sub_planner"
QDS, QDP, QR, R, DS, AG = "QDS", "QDP", "QR", "R", "DS", "AG"

# The accepted spellings of each executor, in any letter case; other words are malformed.
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

# The 16 workflows: each order of each subset of {QR, R, DS}, then AG.
WORKFLOWS = tuple(
    (*order, AG) for n in range(4) for order in itertools.permutations((QR, R, DS), n)
)


def parse_plan(
    text: str,
    *,
    first: bool,
    select_needs_search: bool = False,
    executors: Collection[str] = EXECUTORS,
) -> ParsedAction:
    """Parses a plan: a workflow such as `QR,R,DS,AG`, or a decomposition (`QDS` or `QDP` alone).

    Args:
      text: the text of the planner; a leading `workflow:` is ignored.
      first: whether no legal plan precedes it; only the first plan may be a decomposition.
      select_needs_search: whether `DS` without an earlier `R` is malformed.
      executors: the executors that a plan may contain.
    """
    plan_text = re.sub(r"^\s*workflow\s*:", "", text, flags=re.IGNORECASE)
    items = [item.strip(" \t\r\n.`'\"").lower() for item in re.split(r",|\band\b", plan_text)]
    items = [item for item in items if item]
    if not items:
        return invalid_action("Empty Workflow")
    if any(NAMES.get(item) not in executors for item in items):
        return invalid_action("Unknown Executor")
    # From here on all names are valid; only their combination can be wrong.
    plan = tuple(NAMES[item] for item in items)
    error = _plan_error(plan, first, select_needs_search)
    return invalid_action(error) if error else ParsedAction("Plan", plan)


def _plan_error(plan: tuple[str, ...], first: bool, select_needs_search: bool) -> str:
    """Returns the error of a plan of valid executors; empty if the plan is legal."""
    if plan in ((QDS,), (QDP,)):
        return "" if first else "Decomposed Twice"
    # A decomposition lists no executors: each sub-question gets a workflow.
    if QDS in plan or QDP in plan:
        return "Decomposition Not Alone"
    if len(set(plan)) < len(plan):
        return "Repeated Executor"
    if plan[-1] != AG:
        return "No Answer At The End"
    if select_needs_search and DS in plan and R not in plan[: plan.index(DS)]:
        return "Nothing To Select From"
    return ""


def plan_regex(
    *,
    first: bool,
    select_needs_search: bool = False,
    executors: Collection[str] = EXECUTORS,
) -> str:
    """Returns the regular expression of all legal plans, for the arguments of `parse_plan`."""
    plans = [(QDS,), (QDP,), *WORKFLOWS]
    return "|".join(
        render_plan(plan)
        for plan in plans
        if set(plan) <= set(executors) and not _plan_error(plan, first, select_needs_search)
    )


def render_plan(plan: Sequence[str]) -> str:
    """Returns the planner's text for a plan."""
    return ",".join(plan)
