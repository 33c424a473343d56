"""OPERA in the synthetic corpus: sub-goals, their gold, and the actions of an expert.

A sub-goal is `relation of entity`, where `[1]` stands for the answer of the first sub-goal, or a
comparison of two answers. The true answer is read from passages alone, so that it exists for any
entity, also for one from a wrong earlier answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jax_ragrl.corpus.world import CLUSTERS, RELATIONS
from jax_ragrl.llm.reader import Plan, facts_of, question_of, resolve, understand
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.systems.opera.grammar import (
    ANALYSIS,
    PLAN,
    render_analysis,
    render_plan,
    render_rewrite,
)
from jax_ragrl.systems.opera.rewards import Gold
from jax_ragrl.text.prompts import parse_passages
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


def read_gold(goal: str, passages: Sequence[Passage]) -> Gold:
    """Returns the gold of a sub-goal from passages; none for text that is no sub-goal."""
    none = (False,) * len(passages)
    if answer := comparison_answer(goal):
        return Gold((answer,), none, 0)
    plan = parse_subgoal(goal)
    if plan is None:
        return Gold((), none, 0)
    facts_K = [facts_of(passage.text) for passage in passages]
    steps = resolve(plan, facts_K)
    values = [value for _, value in steps]
    relevant = tuple(any(pair in facts for pair, _ in steps) for facts in facts_K)
    # A chain that breaks has no answer, but its passages so far are relevant.
    if len(steps) < len(plan.hops) or not all(values):
        return Gold((), relevant, len(plan.hops))
    return Gold((conclusion(goal, plan, values),), relevant, len(plan.hops))


def conclusion(goal: str, plan: Plan, values: Sequence[str]) -> str:
    """Returns the answer of a sub-goal or question with a plan, from the value of each hop."""
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


@dataclasses.dataclass(frozen=True)
class WorldExpert:
    """The right action of every role for a prompt of the tiny style."""

    style: str = "opera_tiny"

    def __call__(self, effect: Generate, question: str) -> str | None:
        del question
        return self.write(effect.role, effect.messages[-1].content)

    def write(self, role: str, prompt: str) -> str:
        """Returns the text of the right action of a role for a prompt."""
        goal = question_of(prompt)
        if role == PLAN:
            return render_plan(subgoals(goal) or (goal,))
        if role == ANALYSIS:
            pairs = parse_passages(self.style, prompt)
            gold = read_gold(goal, [Passage("", title, text) for title, text in pairs])
            if not gold.answers:
                return render_analysis("nothing")
            return render_analysis(f"{goal} is {gold.answers[0]}", gold.answers[0])
        return render_rewrite("rephrase", as_query(goal))
