"""A scripted teacher of CoDA's planner and executor, and of agents that search by themselves.

It reads what a context was told and writes the next turn. Where it is careless it answers before
every fact is there, or takes the value of the wrong passage.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence

from jax_ragrl.llm.reader import Plan, facts_of, question_of, resolve
from jax_ragrl.rollout.effects import Segment, Told
from jax_ragrl.systems.coda import PLANNER
from jax_ragrl.systems.opera.subgoals import (
    compared,
    conclusion,
    filled,
    meaning,
    reworded,
    subgoals,
)
from jax_ragrl.systems.tags import render_turn
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.types import Message

UNKNOWN, NOTHING = "unknown", "nothing"
_RESULT = re.compile(r"^Result: ?(.*)$", re.MULTILINE)

Pair = tuple[str, str]
Facts = Mapping[Pair, str]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """How imperfect the teacher is.

    `early_stop` is the chance that a planner answers with a result before the last one is there;
    `misread` the chance that an executor takes a value from the first passage it was shown.
    """

    style: str = "coda_tiny"
    early_stop: float = 0.0
    misread: float = 0.0

    def write(
        self, role: str, messages: Sequence[Message], after: Sequence[Segment], rng: random.Random
    ) -> str:
        """The text of one turn."""
        prompt = messages[-1].content
        question = question_of(prompt)
        told = [segment.text for segment in after if isinstance(segment, Told)]
        if role == PLANNER:
            results = [result for text in told for result in _RESULT.findall(text)]
            return self._plan(question, results, rng)
        shown = [read_numbered(self.style, text) for text in told]
        found = [[facts_of(body) for _, body in documents] for documents in shown if documents]
        return self._execute(question, found, prompt.startswith("look"), rng)

    def _plan(self, question: str, results: Sequence[str], rng: random.Random) -> str:
        goals = subgoals(question) or (question,)
        tasks = goals[:-1] if compared(filled(goals[-1], ("1", "1"))) else goals
        early = bool(results) and rng.random() < self.early_stop
        if len(results) < len(tasks) and UNKNOWN not in results and not early:
            task = filled(tasks[len(results)], results)
            return render_turn(think=str(len(results) + 1), task=task)
        if verdict := compared(filled(goals[-1], results)):
            return render_turn(think=" ".join(results), answer=verdict)
        return render_turn(think="done", answer=results[-1] or UNKNOWN)

    def _execute(
        self, goal: str, found: Sequence[Sequence[Facts]], plain: bool, rng: random.Random
    ) -> str:
        """The next turn of an executor; `plain` has no tag for refinement."""
        plan = meaning(goal)
        if plan is None:
            return render_turn(think=NOTHING, answer=UNKNOWN)
        if not found:
            return render_turn(think=plan.hops[0][0], search=query(missing(plan, found)))
        if len(plan.hops) == 1 and rng.random() < self.misread:
            value = next(iter(found[-1][0].values()), UNKNOWN) if found[-1] else UNKNOWN
            return render_turn(**_noted(f"{goal} is {value}", plain), answer=value)
        wanted, before = missing(plan, found), missing(plan, found[:-1])
        note = "; ".join(f"{r} of {name} is {value}" for (name, r), value in news(plan, found))
        noted = _noted(note or NOTHING, plain)
        if wanted is None:
            values = [value for _, value in resolve(plan, joined(found))]
            return render_turn(**noted, answer=conclusion(goal, plan, values))
        if wanted != before:
            return render_turn(**noted, search=query(wanted))
        if len(found) > 1 and wanted == missing(plan, found[:-2]):
            return render_turn(**noted, answer=UNKNOWN)
        return render_turn(**noted, search=reworded(query(wanted)))


def _noted(note: str, plain: bool) -> dict[str, str]:
    return {"think" if plain else "refine": note}


def joined(found: Sequence[Sequence[Facts]]) -> list[dict[Pair, str]]:
    """The facts of all searches."""
    return [dict(facts) for search in found for facts in search]


def missing(plan: Plan, found: Sequence[Sequence[Facts]]) -> Pair | None:
    """The first fact (entity, relation) that no search has found; None where nothing is missing."""
    return next((pair for pair, value in resolve(plan, joined(found)) if not value), None)


def news(plan: Plan, found: Sequence[Sequence[Facts]]) -> list[tuple[Pair, str]]:
    """What the last search added."""
    known = resolve(plan, joined(found[:-1]))
    return [step for step in resolve(plan, joined(found)) if step[1] and step not in known]


def query(pair: Pair | None) -> str:
    """What to search for a fact."""
    return f"{pair[1]} of {pair[0]}" if pair else NOTHING
