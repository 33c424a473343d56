"""MAO-ARAG without a planner: one workflow for every question (Chen et al. 2025, figure 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import System
from jax_ragrl.systems.base import WrappedSystem
from jax_ragrl.systems.mao_arag.system import MAOARAG, PLAN, State, active_items
from jax_ragrl.systems.mao_arag.workflows import QDP, QDS, WORKFLOWS, render_plan
from jax_ragrl.types import Question

# Each workflow alone, and for the sub-questions of each decomposition.
PLANS: tuple[tuple[str, ...], ...] = tuple(
    (*decomposition, *workflow) for decomposition in ((), (QDS,), (QDP,)) for workflow in WORKFLOWS
)

# Plans of increasing cost, the baselines of a trained planner. Of the last two, which select from
# the passages of each sub-question, the serial one is the best plan of all in the generated world.
USUAL_PLANS = (
    ("AG",),
    ("R", "AG"),
    ("R", "DS", "AG"),
    (QDS, "R", "AG"),
    (QDP, "R", "AG"),
    (QDS, "R", "DS", "AG"),
    (QDP, "R", "DS", "AG"),
)


@dataclasses.dataclass(frozen=True)
class FixedWorkflow(WrappedSystem):
    """MAO-ARAG whose planner always writes `plan`.

    Fields:
      system: the state machine.
      plan: an element of `PLANS`, such as `("R", "AG")`; after `QDS` or `QDP`, the workflow of
        every sub-question.
    """

    system: MAOARAG
    plan: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.plan not in PLANS:
            raise UserError(
                f"{render_plan(self.plan)!r} is not a workflow: use one that ends in AG, such as "
                "R,AG, alone or after QDS or QDP"
            )

    @property
    def roles(self) -> Mapping[str, Role]:
        """No roles: the planner writes nothing."""
        return {}

    def start(self, question: Question) -> State:
        """Returns the state after the first planner call."""
        return self._planned(self.system.start(question))

    def advance(self, state: Any, reply: Any) -> State:
        """Returns the state after a reply and the planner calls that follow it."""
        return self._planned(self.system.advance(state, reply))

    def _planned(self, state: State) -> State:
        # Sub-questions of one decomposition wait for their plans together.
        while (active := active_items(state)) and state.items[active[0]].todo[0] == PLAN:
            actions = (ParsedAction("Plan", self._plan_of(state)),) * len(active)
            # A lone reply comes without a tuple around it.
            state = self.system.advance(state, actions if len(actions) > 1 else actions[0])
        return state

    def _plan_of(self, state: State) -> tuple[str, ...]:
        decomposes = self.plan[0] in (QDS, QDP)
        if decomposes and not state.strategy:
            return self.plan[:1]
        return self.plan[1:] if decomposes else self.plan


def fixed_workflows(system: MAOARAG) -> dict[str, System]:
    """Returns the systems that always write one of the usual plans, by the text of the plan."""
    return {render_plan(plan): FixedWorkflow(system, plan) for plan in USUAL_PLANS}
