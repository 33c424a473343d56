"""The strict grammars of a run's roles, which the learner replays over the tokens of actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jax_ragrl.rollout.roles import Role
from jax_ragrl.text.automaton import FREE, UNPAYABLE, TokenAutomaton, follow, merge
from jax_ragrl.text.tokenizer import ChatTokenizer


@dataclasses.dataclass(frozen=True)
class RoleGrammars:
    """The merged automaton of all roles, on the host, and by role number:

    `starts`, the state before an action, `FREE` for a role without a grammar; `limits`, the maximum
    of new tokens.
    """

    automaton: TokenAutomaton
    starts: tuple[int, ...]
    limits: tuple[int, ...]

    def places(
        self, role: int, ids: Sequence[int], *, was_sampled: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the state before each token of an action, and its budget; int32 `[T]` each.

        `was_sampled`: the sampler wrote all tokens, within the limit of the role. Other actions
        have no limit, and no mask from their first forbidden token on.
        """
        budget_T = np.full(len(ids), UNPAYABLE - 1, np.int32)
        if was_sampled:
            budget_T = self.limits[role] - np.arange(len(ids), dtype=np.int32)
        states = follow(self.automaton, ids, budget_T.tolist(), self.starts[role])
        return np.array(states[:-1], np.int32), budget_T


def role_grammars(roles: Iterable[Role], tokenizer: ChatTokenizer) -> RoleGrammars | None:
    roles = list(roles)
    strict = [role for role in roles if role.strict]
    if not strict:
        return None
    automaton, starts = merge([tokenizer.automaton(role.action_regex) for role in strict])
    start_of = dict(zip((role.name for role in strict), starts, strict=True))
    return RoleGrammars(
        automaton,
        starts=tuple(start_of.get(role.name, FREE) for role in roles),
        limits=tuple(role.sampling.max_tokens for role in roles),
    )
