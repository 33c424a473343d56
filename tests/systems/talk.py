"""A tape for roles whose contexts grow; it records the context of each turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ragrl.rollout.collect import ActionRequest, collect
from jax_ragrl.rollout.effects import ModelOutput
from jax_ragrl.rollout.expand import Expander, single_chain
from jax_ragrl.rollout.tree import Action, Forest
from jax_ragrl.types import Question
from tests.rollout.tape import ANN, Tape, assert_readable


@dataclasses.dataclass
class Talk(Tape):
    """`contexts` has (role, first prompt, later actions and observations) of every turn.

    An empty text represents a context that no longer fits the sampler.
    """

    contexts: list[tuple[str, str, tuple[str, ...]]] = dataclasses.field(default_factory=list)

    def _actions(self, request: ActionRequest) -> list[Action]:
        after = tuple(
            bytes(s.ids).decode() if isinstance(s, ModelOutput) else f"told {s.text}"
            for s in request.history
        )
        self.contexts.append((request.role.name, request.messages[-1].content, after))
        full = Action((), (), "", (), "Prompt Too Long")
        return [action if action.text else full for action in super()._actions(request)]


def talk(
    system: Any,
    texts: Any,
    *questions: Question,
    expander: Expander = single_chain,
    rollouts: int = 1,
    **tape: Any,
) -> tuple[Forest, Talk]:
    """The forest of a recorded rollout of any system, and its tape."""
    tape = Talk(texts, **tape)
    environment = tape.environment()
    forest = collect(system, expander, questions or (ANN,), environment, rollouts=rollouts)
    assert_readable(forest)
    return forest, tape


def ends(forest: Forest) -> Sequence[tuple[str | None, str]]:
    """The answer and the finish reason of each rollout."""
    return [(r.answer, r.finish_reason) for r in forest.records if r.role == "leaf"]
