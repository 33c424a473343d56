"""The interface of a system: a pure state machine over effects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jax_ragrl.rollout.effects import Effect
from jax_ragrl.rollout.roles import Role
from jax_ragrl.types import Question


class System(Protocol):
    """A system of language-model agents. States are values: a branch is a copy.

    `wants` says what a state waits for, one effect or several at once: `Done` alone ends it.
    `advance` takes the reply (a `Parsed` to `Generate`, `Hits` to `Search`, a string to `Ask`; a
    tuple of them, in order, to several) and must be pure. `style` names the prompts, `top_k` is
    how many passages a search returns.
    """

    @property
    def style(self) -> str: ...

    @property
    def top_k(self) -> int: ...

    @property
    def roles(self) -> Mapping[str, Role]: ...

    def start(self, question: Question) -> Any: ...

    def wants(self, state: Any) -> Effect | tuple[Effect, ...]: ...

    def advance(self, state: Any, reply: Any) -> Any: ...
