"""Sub-goals in the synthetic corpus: how a question decomposes, and the true answer of a sub-goal.

A sub-goal is `relation of entity`, where `[1]` stands for the answer of the first sub-goal, or a
comparison of two answers. The true answer is read from passages alone, so that it exists for any
entity, also for one from a wrong earlier answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_ragrl.corpus.world import CLUSTERS, RELATIONS
from jax_ragrl.llm.reader import Plan, facts_of, resolve, understand
from jax_ragrl.types import Passage

_SINGLE = re.compile(r"^(\w+) of (.+)$")
_OLDER = re.compile(r"^older: (.+) (\d+), (.+) (\d+)$")
_SAME = re.compile(r"^same: (.+), (.+)$")

# The words by which passages express a relation; short words would match any passage.
RELATION_WORDS: Mapping[str, str] = {
    relation: " ".join(dict.fromkeys(re.findall(r"\b[a-z]{4,}\b", " ".join(forms))))
    for clusters in CLUSTERS.values()
    for relations, forms in clusters
    for relation in relations
}


class Truth(NamedTuple):
    """The true answer of a sub-goal according to some passages.

    Fields:
      answer: the answer; empty if the passages do not contain it.
      relevant: per passage, whether it is relevant to the sub-goal.
      total: the number of relevant passages in the corpus.
    """

    answer: str
    relevant: tuple[bool, ...]
    total: int


def subgoals(question: str) -> tuple[str, ...]:
    """Returns the sub-goals of a question of the synthetic corpus in order; () for other text."""
    plan = understand(question)
    if plan is None:
        return ()
    # A hop without a name continues from the answer of the previous one.
    goals = [f"{relation} of {name or f'[{i}]'}" for i, (relation, name) in enumerate(plan.hops)]
    if plan.compare:
        # Ages are compared by name and year, other values only with each other.
        names = [f"{name} " if plan.compare == "year" else "" for _, name in plan.hops]
        word = "older" if plan.compare == "year" else "same"
        goals.append(f"{word}: {names[0]}[1], {names[1]}[2]")
    return tuple(goals)


def fill_answers(goal: str, answers: Sequence[str]) -> str:
    """Replaces the placeholders of a sub-goal by the answers of earlier sub-goals."""
    for i, answer in enumerate(answers, start=1):
        goal = goal.replace(f"[{i}]", answer)
    return goal


def comparison_answer(goal: str) -> str:
    """Returns the answer of a comparison that contains both values; empty for other sub-goals."""
    if match := _OLDER.match(goal):
        first, a, second, b = match.groups()
        # `int` refuses very long numbers, and a policy may write any.
        return first if int(a[:9]) <= int(b[:9]) else second
    if match := _SAME.match(goal):
        return "yes" if match[1] == match[2] else "no"
    return ""


def parse_subgoal(goal: str) -> Plan | None:
    """Parses a sub-goal, or a complete question, as a plan; None for other text."""
    match = _SINGLE.match(goal)
    if match and match[1] in RELATIONS:
        return Plan(((match[1], match[2]),))
    return understand(goal)


def read_truth(goal: str, passages: Sequence[Passage]) -> Truth | None:
    """Returns the true answer of a sub-goal in some passages; None if it is not a sub-goal."""
    if answer := comparison_answer(goal):
        return Truth(answer, (False,) * len(passages), 0)
    plan = parse_subgoal(goal)
    if plan is None:
        return None
    facts_K = [facts_of(passage.text) for passage in passages]
    steps = resolve(plan, facts_K)
    values = [value for _, value in steps]
    relevant = tuple(any(pair in facts for pair, _ in steps) for facts in facts_K)
    # A chain that breaks has no answer, but its passages so far are relevant.
    if len(steps) < len(plan.hops) or not all(values):
        return Truth("", relevant, len(plan.hops))
    return Truth(conclusion(goal, plan, values), relevant, len(plan.hops))


def conclusion(goal: str, plan: Plan, values: Sequence[str]) -> str:
    """Returns the answer of a sub-goal or a complete question.

    Args:
      goal: the text of the sub-goal or question.
      plan: its plan.
      values: the value of each hop of the plan.
    """
    if not plan.compare:
        return values[-1]
    return comparison_answer(fill_answers(subgoals(goal)[-1], values))


def as_query(goal: str) -> str:
    """Returns a sub-goal as a query in the words of passages; unchanged if it has several hops."""
    plan = parse_subgoal(goal)
    if plan is None or len(plan.hops) > 1:
        return goal
    relation, name = plan.hops[0]
    return f"{name} {RELATION_WORDS[relation]}"
