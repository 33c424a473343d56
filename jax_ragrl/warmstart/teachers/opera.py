"""A scripted teacher of OPERA's roles in the generated encyclopedia.

Where it is careless it plans in a single step, believes the first passage it is shown, or repeats
the query that failed.
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
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.types import Message


@dataclasses.dataclass(frozen=True)
class Teacher:
    """How imperfect the teacher is: the chance of each of its flaws, in this order of roles."""

    style: str = "opera_tiny"
    single_step: float = 0.0
    credulous: float = 0.0
    stubborn: float = 0.0

    def write(
        self, role: str, messages: Sequence[Message], after: Sequence[Segment], rng: random.Random
    ) -> str:
        """The text of one action."""
        del after
        prompt = messages[-1].content
        chance = {PLAN: self.single_step, ANALYSIS: self.credulous, REWRITE: self.stubborn}
        if rng.random() < chance[role]:
            return self._careless(role, prompt)
        return WorldExpert(self.style).write(role, prompt)

    def _careless(self, role: str, prompt: str) -> str:
        asked = question_of(prompt)
        if role == PLAN:
            return render_plan([asked])
        if role == REWRITE:
            return render_rewrite("rephrase", asked)
        shown = read_numbered(self.style, prompt)
        value = next((v for _, text in shown[:1] for v in facts_of(text).values()), "")
        return render_analysis(f"{asked} is {value}" if value else "nothing", value)
