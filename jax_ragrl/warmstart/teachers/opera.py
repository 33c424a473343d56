"""A scripted teacher of OPERA's roles in the synthetic corpus.

Its errors: it plans a single step, accepts the first passage, or repeats the query that failed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from jax_ragrl.llm.reader import facts_of, question_of
from jax_ragrl.rollout.effects import Segment
from jax_ragrl.systems.opera.grammar import (
    ANALYSIS,
    PLAN,
    REWRITE,
    render_analysis,
    render_plan,
    render_rewrite,
)
from jax_ragrl.systems.opera.world import WorldExpert
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import Message


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The teacher and its errors.

    Fields:
      style: prompt style.
      p_single_step: probability of a plan of one step.
      p_accept_first: probability that the analysis accepts the first passage.
      p_repeat_query: probability that the rewriter repeats the failed query.
    """

    style: str = "opera_tiny"
    p_single_step: float = 0.0
    p_accept_first: float = 0.0
    p_repeat_query: float = 0.0

    def write(
        self, role: str, messages: Sequence[Message], history: Sequence[Segment], rng: random.Random
    ) -> str:
        """Writes one action, see `TeacherScript`."""
        del history
        prompt = messages[-1].content
        chance = {
            PLAN: self.p_single_step,
            ANALYSIS: self.p_accept_first,
            REWRITE: self.p_repeat_query,
        }
        if rng.random() < chance[role]:
            return self._careless(role, prompt)
        return WorldExpert(self.style).write(role, prompt)

    def _careless(self, role: str, prompt: str) -> str:
        goal = question_of(prompt)
        if role == PLAN:
            return render_plan([goal])
        if role == REWRITE:
            return render_rewrite("rephrase", goal)
        documents = parse_passages(self.style, prompt)
        value = next((v for _, text in documents[:1] for v in facts_of(text).values()), "")
        return render_analysis(f"{goal} is {value}" if value else "nothing", value)
