"""MAO-ARAG without a planner: one workflow for every question (Chen et al. 2025, figure 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Steps, System
from jax_ragrl.systems.base import WrappedSystem, with_actions
from jax_ragrl.systems.mao_arag.system import MAOARAG
from jax_ragrl.systems.mao_arag.workflows import PLANNER, QDP, QDS, WORKFLOWS, render_plan
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
      system: the system.
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

    def steps(self, question: Question) -> Steps:
        """Yields the steps of the workflow, without the planner calls."""
        # The decomposition, if there is one, comes first; then the workflow of each sub-question.
        start = 1 if self.plan[0] in (QDS, QDP) else 0

        def write(effect: Generate) -> ParsedAction:
            first = start and effect.role == PLANNER
            return ParsedAction("Plan", self.plan[:1] if first else self.plan[start:])

        return with_actions(self.system.steps(question), write)


def fixed_workflows(system: MAOARAG) -> dict[str, System]:
    """Returns the systems that always write one of the usual plans, by the text of the plan."""
    return {render_plan(plan): FixedWorkflow(system, plan) for plan in USUAL_PLANS}
