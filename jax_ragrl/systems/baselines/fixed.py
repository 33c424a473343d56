"""C-3PO with its router fixed: one strategy for every question (Chen et al. 2025, table 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.rollout.roles import Role
from jax_ragrl.systems.base import Wrapped
from jax_ragrl.systems.c3po import RETRIEVAL, ROUTER, State, parse_router, render_router
from jax_ragrl.types import Question


@dataclasses.dataclass(frozen=True)
class FixedStrategy(Wrapped):
    """`strategy` is `No Retrieval`, `Retrieval` (with the question as the query) or `Planning`."""

    strategy: str

    @property
    def roles(self) -> Mapping[str, Role]:
        """Every role but the router."""
        return {name: role for name, role in self.system.roles.items() if name != ROUTER}

    def start(self, question: Question) -> State:
        """The state behind the router, as if it had written the forced text."""
        query = question.text if self.strategy == RETRIEVAL else ""
        forced = parse_router(render_router(self.strategy, query))
        return self.system.advance(self.system.start(question), forced)
