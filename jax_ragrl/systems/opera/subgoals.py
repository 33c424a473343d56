"""Sub-goals of the generated encyclopedia: how a question falls into them, and what is true of one.

A sub-goal is `relation of entity`, where `[1]` stands for the answer of the first, or a comparison
of two answers. What is true of it is read from passages alone, so it can be told for any entity,
the wrong ones among them.
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

# The words that passages use for a relation, beside the names.
WORDS: Mapping[str, str] = {
    relation: " ".join(dict.fromkeys(re.findall(r"\b[a-z]{4,}\b", " ".join(forms))))
    for clusters in CLUSTERS.values()
    for relations, forms in clusters
    for relation in relations
}


class Truth(NamedTuple):
    """What passages tell of a sub-goal.

    `answer` is empty where they do not tell it. `relevant` says of each passage whether it bears on
    the sub-goal, and `total` how many of all passages do.
    """

    answer: str
    relevant: tuple[bool, ...]
    total: int


def subgoals(question: str) -> tuple[str, ...]:
    """The sub-goals of a question of the encyclopedia, in order; none for any other text."""
    plan = understand(question)
    if plan is None:
        return ()
    goals = [f"{relation} of {name or f'[{i}]'}" for i, (relation, name) in enumerate(plan.hops)]
    if plan.compare:
        names = [f"{name} " if plan.compare == "year" else "" for _, name in plan.hops]
        word = "older" if plan.compare == "year" else "same"
        goals.append(f"{word}: {names[0]}[1], {names[1]}[2]")
    return tuple(goals)


def filled(goal: str, answers: Sequence[str]) -> str:
    """A sub-goal with the answers of earlier ones in their places."""
    for i, answer in enumerate(answers, start=1):
        goal = goal.replace(f"[{i}]", answer)
    return goal


def compared(goal: str) -> str:
    """The answer of a comparison with both values in it; empty for any other sub-goal."""
    if found := _OLDER.match(goal):
        first, a, second, b = found.groups()
        return first if int(a[:9]) <= int(b[:9]) else second
    if found := _SAME.match(goal):
        return "yes" if found[1] == found[2] else "no"
    return ""


def meaning(goal: str) -> Plan | None:
    """A sub-goal, or a whole question, as a plan; None for a text that is neither."""
    found = _SINGLE.match(goal)
    if found and found[1] in RELATIONS:
        return Plan(((found[1], found[2]),))
    return understand(goal)


def truth(goal: str, passages: Sequence[Passage]) -> Truth | None:
    """What passages tell of a sub-goal; None where it asks nothing of the encyclopedia."""
    if answer := compared(goal):
        return Truth(answer, (False,) * len(passages), 0)
    plan = meaning(goal)
    if plan is None:
        return None
    told = [facts_of(passage.text) for passage in passages]
    steps = resolve(plan, told)
    values = [value for _, value in steps]
    relevant = tuple(any(pair in facts for pair, _ in steps) for facts in told)
    if len(steps) < len(plan.hops) or not all(values):
        return Truth("", relevant, len(plan.hops))
    return Truth(conclusion(goal, plan, values), relevant, len(plan.hops))


def conclusion(goal: str, plan: Plan, values: Sequence[str]) -> str:
    """The answer of a sub-goal, or a whole question, from the values of its plan's hops."""
    return compared(filled(subgoals(goal)[-1], values)) if plan.compare else values[-1]


def reworded(goal: str) -> str:
    """A sub-goal as a query in the words of passages; itself where it is no single fact."""
    plan = meaning(goal)
    if plan is None or len(plan.hops) > 1:
        return goal
    relation, name = plan.hops[0]
    return f"{name} {WORDS[relation]}"
