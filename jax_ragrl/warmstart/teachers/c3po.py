"""A scripted teacher of C-3PO's three roles in the synthetic corpus.

It replaces the paper's 72B model with few-shot prompts: it reads the text of a prompt and writes a
valid action. Like such a model it is imperfect: it chooses strategies at random, may select
passages that merely share a name, and may stop early. Rejection sampling then retains the actions
that led to a correct answer (Chen et al. 2025, section 5.2).
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence

from jax_ragrl.llm.executors import query_of
from jax_ragrl.llm.reader import Plan, facts_of, question_of, resolve, understand
from jax_ragrl.rollout.effects import Segment
from jax_ragrl.systems.c3po import (
    FILTER,
    LLM,
    NO_RETRIEVAL,
    PLANNING,
    RETRIEVAL,
    ROUTER,
    render_decision,
    render_filter,
    render_router,
)
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import Message

_OBJECTIVE = re.compile(r"^Objective: .*?next (\w+) of (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The teacher and its errors.

    Fields:
      style: prompt style.
      p_keep_related: probability that a selection includes every passage that shares a name with
        the objective.
      p_early_stop: probability that a decision ends the search too early.
    """

    style: str = "c3po_tiny"
    p_keep_related: float = 0.0
    p_early_stop: float = 0.0

    def write(
        self, role: str, messages: Sequence[Message], history: Sequence[Segment], rng: random.Random
    ) -> str:
        """Writes one action, see `TeacherScript`."""
        del history
        prompt = messages[-1].content
        question = question_of(prompt)
        plan = understand(question)
        documents = parse_passages(self.style, prompt)
        if plan is None:
            return render_router(RETRIEVAL, question)
        if role == ROUTER:
            choice = (NO_RETRIEVAL, RETRIEVAL, PLANNING)[int(rng.random() * 3)]
            return render_router(choice, query_of(plan) if choice == RETRIEVAL else "")
        if role == FILTER:
            return self._filter(plan, prompt, documents, rng)
        return self._decide(plan, prompt, documents, rng)

    def _filter(
        self, plan: Plan, prompt: str, documents: Sequence[tuple[str, str]], rng: random.Random
    ) -> str:
        objective = _OBJECTIVE.findall(prompt)
        goal = Plan(tuple(tuple(o) for o in objective)) if objective else plan
        facts = [facts_of(text) for _, text in documents]
        steps = [step for step in resolve(goal, facts) if step[1]]
        pairs = [pair for pair, _ in steps]
        keep = [
            i
            for i, pairs_of_text in enumerate(facts, 1)
            if any(pair in pairs_of_text for pair in pairs)
        ]
        if rng.random() < self.p_keep_related:
            names = {word for _, entity in goal.hops if entity for word in entity.split()}
            keep = [
                i
                for i, (title, _) in enumerate(documents, 1)
                if i in keep or names & set(title.split())
            ]
        first = goal.hops[0]
        thought = "; ".join(f"{r} of {e} is {value}" for (e, r), value in steps)
        return render_filter(thought or f"nothing on {first[0]} of {first[1]}", tuple(keep))

    def _decide(
        self, plan: Plan, prompt: str, documents: Sequence[tuple[str, str]], rng: random.Random
    ) -> str:
        steps = resolve(plan, [facts_of(text) for _, text in documents])
        values = [value for _, value in steps if value]
        thought = " ".join(f"{i}. {value}" for i, value in enumerate(values, 1))
        missing = next((pair for pair, value in steps if not value), None)
        if missing:
            query = f"{missing[1]} of {missing[0]}"
            is_repeated = sum(title == query for title, _ in documents)
            if not is_repeated and not (
                prompt.startswith("finish") or rng.random() < self.p_early_stop
            ):
                return render_decision(f"{thought} next {query}".strip(), RETRIEVAL, query)
        return render_decision(f"{thought} done".strip(), LLM)
