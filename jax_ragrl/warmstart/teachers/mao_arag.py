"""A scripted planner for MAO-ARAG in the generated encyclopedia.

It stands where the paper distils a large planner into a small one: serial decomposition for
chains, parallel for comparisons, one search for a single fact.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from jax_ragrl.llm.reader import question_of, understand
from jax_ragrl.rollout.effects import Segment
from jax_ragrl.runtime.portable_random import pick
from jax_ragrl.systems.mao_arag import PLANNER
from jax_ragrl.systems.workflows import AG, DS, QDP, QDS, WORKFLOWS, R, render_plan
from jax_ragrl.types import Message


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Plans by the form of the question; `workflow` is for what needs no decomposition.

    `hasty` is the chance that a question of several facts is searched once all the same, `wander`
    that of a legal plan drawn at random, `swap` that a decomposition is the other one.
    """

    workflow: tuple[str, ...] = (R, DS, AG)
    hasty: float = 0.0
    wander: float = 0.0
    swap: float = 0.0

    def write(
        self,
        role: str,
        messages: Sequence[Message],
        after: Sequence[Segment],
        rng: random.Random,
    ) -> str:
        """The text of one action."""
        del after
        plan = understand(question_of(messages[-1].content))
        first = role == PLANNER
        if rng.random() < self.wander:
            return render_plan(pick(rng, (*WORKFLOWS, *([(QDS,), (QDP,)] if first else []))))
        single = not first or plan is None or len(plan.hops) == 1
        if single or rng.random() < self.hasty:
            return render_plan(self.workflow)
        parallel = bool(plan and plan.compare) != (rng.random() < self.swap)
        return render_plan((QDP,) if parallel else (QDS,))
