"""A tape for roles whose contexts grow: it keeps what each turn's context held."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ragrl.rollout.collect import ActionRequest, collect
from jax_ragrl.rollout.effects import Said
from jax_ragrl.rollout.expand import Expander, once
from jax_ragrl.rollout.tree import Action, Forest
from jax_ragrl.types import Question
from tests.rollout.tape import ANN, Tape, assert_told


@dataclasses.dataclass
class Talk(Tape):
    """`contexts` holds (role, first prompt, what was said and told since) of every turn.

    An empty text stands for a context that no longer fits the sampler.
    """

    contexts: list[tuple[str, str, tuple[str, ...]]] = dataclasses.field(default_factory=list)

    def _actions(self, request: ActionRequest) -> list[Action]:
        after = tuple(
            bytes(s.ids).decode() if isinstance(s, Said) else f"told {s.text}"
            for s in request.after
        )
        self.contexts.append((request.role.name, request.messages[-1].content, after))
        full = Action((), (), "", (), "Prompt Too Long")
        return [action if action.text else full for action in super()._actions(request)]


def talk(
    system: Any,
    texts: Any,
    *questions: Question,
    expander: Expander = once,
    rollouts: int = 1,
    **tape: Any,
) -> tuple[Forest, Talk]:
    """The forest of a recorded rollout of any system, and the tape that played it."""
    played = Talk(texts, **tape)
    environment = played.environment()
    forest = collect(system, expander, questions or (ANN,), environment, rollouts=rollouts)
    assert_told(forest)
    return forest, played


def ends(forest: Forest) -> Sequence[tuple[str | None, str]]:
    """What each rollout answered, and why it ended."""
    return [(r.answer, r.why) for r in forest.records if r.role == "leaf"]
