"""The shape of a system: a pure state machine over effects, and the recipe that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jax_ragrl.rollout.effects import Effect
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.types import Hits, Question

Reply = Parsed | Hits | str


class System(Protocol):
    """A system of language-model agents. States are values: a branch is a copy.

    `wants` says what a state waits for: `Done` alone ends it. `advance` takes the reply (a `Parsed`
    to `Generate`, `Hits` to `Search`, a string to `Ask`) and must be pure.
    """

    @property
    def roles(self) -> Mapping[str, Role]: ...

    def start(self, question: Question) -> Any: ...

    def wants(self, state: Any) -> Effect: ...

    def advance(self, state: Any, reply: Reply) -> Any: ...
