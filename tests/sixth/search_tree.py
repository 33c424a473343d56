"""A sixth system, in none of the papers: an agent that searches, in trees, with Monte Carlo credit.

CoDA's executor works on the question itself; its first turns are tried `width` times, as C-3PO's
are, and a turn earns what the leaves below it earn.
"""

from __future__ import annotations

import dataclasses
import functools

from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.rollout.expand import Tree
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.text.metrics import f1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`: the agent, and its tree."""

    agent: SearchAgent = SearchAgent()
    width: int = 2
    until: int = 2


def recipe(settings: Settings) -> Recipe:
    """Trees of turns, F1 at the leaves, the mean over reachable leaves as credit."""
    return Recipe(
        system=settings.agent,
        reward=functools.partial(answer_rewards, metric=f1),
        credit=reachable_leaves,
        expander=lambda roles: Tree(settings.width, settings.until),
    )
