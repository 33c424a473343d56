"""C-3PO with its router fixed: one strategy for every question (Chen et al. 2025, table 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_ragrl.rollout.effects import Effect
from jax_ragrl.rollout.roles import Role
from jax_ragrl.systems.c3po import C3PO, RETRIEVAL, ROUTER, State, parse_router, render_router
from jax_ragrl.types import Question


@dataclasses.dataclass(frozen=True)
class FixedStrategy:
    """`strategy` is `No Retrieval`, `Retrieval` (with the question as the query) or `Planning`."""

    system: C3PO
    strategy: str

    @property
    def style(self) -> str:
        """The system's."""
        return self.system.style

    @property
    def top_k(self) -> int:
        """The system's."""
        return self.system.top_k

    @property
    def roles(self) -> Mapping[str, Role]:
        """Every role but the router."""
        return {name: role for name, role in self.system.roles.items() if name != ROUTER}

    def start(self, question: Question) -> State:
        """The state behind the router, as if it had written the forced text."""
        query = question.text if self.strategy == RETRIEVAL else ""
        forced = parse_router(render_router(self.strategy, query))
        return self.system.advance(self.system.start(question), forced)

    def wants(self, state: State) -> Effect:
        """The system's."""
        return self.system.wants(state)

    def advance(self, state: State, reply: Any) -> State:
        """The system's."""
        return self.system.advance(state, reply)
