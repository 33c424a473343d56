"""A scripted teacher of CoDA's planner and executor, and of single search agents.

It reads the observations in a context and writes the next turn. Its errors: it may answer before
every fact is known, or use the value of the wrong passage.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence

from jax_ragrl.llm.reader import Plan, facts_of, question_of, resolve
from jax_ragrl.rollout.effects import Observation, Segment
from jax_ragrl.systems.coda import PLANNER
from jax_ragrl.systems.opera.world import (
    as_query,
    comparison_answer,
    conclusion,
    fill_answers,
    parse_subgoal,
    subgoals,
)
from jax_ragrl.systems.tags import render_turn
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import Message

UNKNOWN, NOTHING = "unknown", "nothing"
_RESULT = re.compile(r"^Result: ?(.*)$", re.MULTILINE)

Pair = tuple[str, str]
Facts = Mapping[Pair, str]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The teacher and its errors.

    Fields:
      style: prompt style.
      p_early_stop: probability that a planner answers before it has the last result.
      p_misread: probability that an executor uses a value of the first passage.
    """

    style: str = "coda_tiny"
    p_early_stop: float = 0.0
    p_misread: float = 0.0

    def write(
        self, role: str, messages: Sequence[Message], history: Sequence[Segment], rng: random.Random
    ) -> str:
        """Writes one turn, see `TeacherScript`."""
        prompt = messages[-1].content
        question = question_of(prompt)
        observations = [segment.text for segment in history if isinstance(segment, Observation)]
        if role == PLANNER:
            results = [result for text in observations for result in _RESULT.findall(text)]
            return self._plan(question, results, rng)
        searches = [parse_passages(self.style, text) for text in observations]
        facts = [[facts_of(body) for _, body in documents] for documents in searches if documents]
        return self._execute(question, facts, prompt.startswith("look"), rng)

    def _plan(self, question: str, results: Sequence[str], rng: random.Random) -> str:
        goals = subgoals(question) or (question,)
        tasks = goals[:-1] if comparison_answer(fill_answers(goals[-1], ("1", "1"))) else goals
        early = bool(results) and rng.random() < self.p_early_stop
        if len(results) < len(tasks) and UNKNOWN not in results and not early:
            task = fill_answers(tasks[len(results)], results)
            return render_turn(think=str(len(results) + 1), task=task)
        if verdict := comparison_answer(fill_answers(goals[-1], results)):
            return render_turn(think=" ".join(results), answer=verdict)
        return render_turn(think="done", answer=results[-1] or UNKNOWN)

    def _execute(
        self, goal: str, facts: Sequence[Sequence[Facts]], plain: bool, rng: random.Random
    ) -> str:
        """Writes the next turn of an executor from the facts in each passage of each search."""
        plan = parse_subgoal(goal)
        if plan is None:
            return render_turn(think=NOTHING, answer=UNKNOWN)
        if not facts:
            return render_turn(think=plan.hops[0][0], search=query(missing(plan, facts)))
        if len(plan.hops) == 1 and rng.random() < self.p_misread:
            value = next(iter(facts[-1][0].values()), UNKNOWN) if facts[-1] else UNKNOWN
            return render_turn(**_note(f"{goal} is {value}", plain), answer=value)
        next_fact, previous = missing(plan, facts), missing(plan, facts[:-1])
        note = "; ".join(f"{r} of {name} is {value}" for (name, r), value in new_facts(plan, facts))
        thought = _note(note or NOTHING, plain)
        if next_fact is None:
            values = [value for _, value in resolve(plan, all_facts(facts))]
            return render_turn(**thought, answer=conclusion(goal, plan, values))
        if next_fact != previous:
            return render_turn(**thought, search=query(next_fact))
        if len(facts) > 1 and next_fact == missing(plan, facts[:-2]):
            return render_turn(**thought, answer=UNKNOWN)
        return render_turn(**thought, search=as_query(query(next_fact)))


def _note(note: str, plain: bool) -> dict[str, str]:
    return {"think" if plain else "refine": note}


def all_facts(facts: Sequence[Sequence[Facts]]) -> list[dict[Pair, str]]:
    """Returns the facts of all passages of all searches."""
    return [dict(passage) for search in facts for passage in search]


def missing(plan: Plan, facts: Sequence[Sequence[Facts]]) -> Pair | None:
    """Returns the first unknown fact of a plan as (entity, relation); None if all are known."""
    return next((pair for pair, value in resolve(plan, all_facts(facts)) if not value), None)


def new_facts(plan: Plan, facts: Sequence[Sequence[Facts]]) -> list[tuple[Pair, str]]:
    """Returns the steps of a plan that the last search added."""
    before = resolve(plan, all_facts(facts[:-1]))
    return [step for step in resolve(plan, all_facts(facts)) if step[1] and step not in before]


def query(pair: Pair | None) -> str:
    return f"{pair[1]} of {pair[0]}" if pair else NOTHING
