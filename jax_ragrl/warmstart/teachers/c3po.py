"""A scripted teacher that plays C-3PO's three roles in the generated encyclopedia.

It stands where the paper has a 72B model with few-shot prompts: it reads the text of a prompt,
writes a legal action, and is imperfect in the ways such a teacher is. It chooses strategies without
regard to the question, it keeps passages that merely share a name, and it sometimes stops early.
Rejection sampling keeps what led to a right answer all the same (Chen et al. 2025, section 5.2).
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
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.types import Message

_OBJECTIVE = re.compile(r"^Objective: .*?next (\w+) of (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Teacher:
    """How imperfect the teacher is.

    `greedy_filter` is the chance that a selection also keeps every passage that shares a name with
    what is looked for; `early_stop` the chance that a decision hands over too soon.
    """

    style: str = "c3po_tiny"
    greedy_filter: float = 0.0
    early_stop: float = 0.0

    def write(
        self, role: str, messages: Sequence[Message], after: Sequence[Segment], rng: random.Random
    ) -> str:
        """The text of one action; this proxy has no conversations of several turns."""
        del after
        prompt = messages[-1].content
        question = question_of(prompt)
        plan = understand(question)
        documents = read_numbered(self.style, prompt)
        if plan is None:
            return render_router(RETRIEVAL, question)
        if role == ROUTER:
            return self._route(plan, rng)
        if role == FILTER:
            return self._filter(plan, prompt, documents, rng)
        return self._decide(plan, prompt, documents, rng)

    def _route(self, plan: Plan, rng: random.Random) -> str:
        choice = (NO_RETRIEVAL, RETRIEVAL, PLANNING)[int(rng.random() * 3)]
        return render_router(choice, query_of(plan) if choice == RETRIEVAL else "")

    def _filter(
        self, plan: Plan, prompt: str, documents: Sequence[tuple[str, str]], rng: random.Random
    ) -> str:
        objective = _OBJECTIVE.findall(prompt)
        wanted = Plan(tuple(tuple(o) for o in objective)) if objective else plan
        told = [facts_of(text) for _, text in documents]
        found = [step for step in resolve(wanted, told) if step[1]]
        pairs = [pair for pair, _ in found]
        keep = [i for i, facts in enumerate(told, 1) if any(pair in facts for pair in pairs)]
        if rng.random() < self.greedy_filter:
            names = {word for _, entity in wanted.hops if entity for word in entity.split()}
            keep = [
                i
                for i, (title, _) in enumerate(documents, 1)
                if i in keep or names & set(title.split())
            ]
        first = wanted.hops[0]
        thought = "; ".join(f"{r} of {e} is {value}" for (e, r), value in found)
        return render_filter(thought or f"nothing on {first[0]} of {first[1]}", tuple(keep))

    def _decide(
        self, plan: Plan, prompt: str, documents: Sequence[tuple[str, str]], rng: random.Random
    ) -> str:
        steps = resolve(plan, [facts_of(text) for _, text in documents])
        known = [value for _, value in steps if value]
        thought = " ".join(f"{i}. {value}" for i, value in enumerate(known, 1))
        missing = next((pair for pair, value in steps if not value), None)
        if missing:
            query = f"{missing[1]} of {missing[0]}"
            tried = sum(title == query for title, _ in documents)
            if not tried and not (prompt.startswith("finish") or rng.random() < self.early_stop):
                return render_decision(f"{thought} next {query}".strip(), RETRIEVAL, query)
        return render_decision(f"{thought} done".strip(), LLM)
