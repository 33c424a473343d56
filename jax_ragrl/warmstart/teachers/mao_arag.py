"""A scripted planner for MAO-ARAG in the synthetic corpus.

It replaces the large planner that the paper distils into a small one: serial decomposition for
chains, parallel decomposition for comparisons, a single search for a single fact.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from jax_ragrl.llm.reader import question_of, understand
from jax_ragrl.rollout.effects import Segment
from jax_ragrl.runtime.portable_random import pick
from jax_ragrl.systems.mao_arag import AG, DS, PLANNER, QDP, QDS, WORKFLOWS, R, render_plan
from jax_ragrl.types import Message


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A planner that decides by the form of the question, and its errors.

    Fields:
      workflow: the plan for questions that need no decomposition.
      p_single_search: probability that a question of several facts is not decomposed.
      p_random_plan: probability of a random valid plan.
      p_swap_decomposition: probability of the other kind of decomposition.
    """

    workflow: tuple[str, ...] = (R, DS, AG)
    p_single_search: float = 0.0
    p_random_plan: float = 0.0
    p_swap_decomposition: float = 0.0

    def write(
        self, role: str, messages: Sequence[Message], history: Sequence[Segment], rng: random.Random
    ) -> str:
        """Writes one plan, see `TeacherScript`."""
        del history
        plan = understand(question_of(messages[-1].content))
        first = role == PLANNER
        if rng.random() < self.p_random_plan:
            return render_plan(pick(rng, (*WORKFLOWS, *([(QDS,), (QDP,)] if first else []))))
        single = not first or plan is None or len(plan.hops) == 1
        if single or rng.random() < self.p_single_search:
            return render_plan(self.workflow)
        parallel = bool(plan and plan.compare) != (rng.random() < self.p_swap_decomposition)
        return render_plan((QDP,) if parallel else (QDS,))
