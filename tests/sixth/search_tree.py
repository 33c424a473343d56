"""A sixth system, in none of the papers: an agent that searches, in trees, with Monte Carlo credit.

CoDA's executor answers the question itself. Its first turns are tried `width` times, as in C-3PO,
and the credit of a turn is the mean reward of the leaves below it.
"""

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

    system: SearchAgent = SearchAgent()
    width: int = 2
    branching_depth: int = 2


def recipe(settings: Settings) -> Recipe:
    """Builds the recipe: trees of turns, F1 at the leaves, mean over reachable leaves as credit."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(answer_rewards, metric=f1),
        credit=reachable_leaves,
        expander=lambda roles: Tree(settings.width, settings.branching_depth),
    )
