"""C-3PO with a fixed router: one strategy for every question (Chen et al. 2025, table 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.system import Steps, System
from jax_ragrl.systems.base import WrappedSystem, with_actions
from jax_ragrl.systems.c3po.system import (
    NO_RETRIEVAL,
    PLANNING,
    RETRIEVAL,
    ROUTER,
    parse_router,
    render_router,
)
from jax_ragrl.types import Question


@dataclasses.dataclass(frozen=True)
class FixedStrategy(WrappedSystem):
    """C-3PO whose router always takes `strategy`.

    `strategy` is `No Retrieval`, `Retrieval` (the question is the query) or `Planning`.
    """

    strategy: str

    @property
    def roles(self) -> Mapping[str, Role]:
        """Every role except the router."""
        return {name: role for name, role in self.system.roles.items() if name != ROUTER}

    def steps(self, question: Question) -> Steps:
        """Yields the steps after the router, as if it had written the text of the strategy."""
        query = question.text if self.strategy == RETRIEVAL else ""
        route = parse_router(render_router(self.strategy, query))
        return with_actions(
            self.system.steps(question), lambda effect: route if effect.role == ROUTER else None
        )


def fixed_strategies(system: System) -> dict[str, System]:
    """Returns `system` with each of the three strategies fixed, by the name of the strategy."""
    return {name: FixedStrategy(system, name) for name in (NO_RETRIEVAL, RETRIEVAL, PLANNING)}
