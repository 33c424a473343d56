"""C-3PO in single chains with a reward that may be wrong, for runs that collapse.

    ragrl train --config=configs/tiny/collapse.py:format --workdir=runs/format

Several rollouts per question are compared with each other. With `answer` the reward is right.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jax_ragrl.config.schema import one_of
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.base import Recipe, path_from_root
from jax_ragrl.systems.c3po.recipe import Settings as PaperSettings
from jax_ragrl.systems.c3po.recipe import recipe as paper_recipe
from jax_ragrl.systems.c3po.system import C3PO
from jax_ragrl.text.metrics import cover_match_tokens


def format_rewards(forest: Forest, per_action: float = 0.0) -> np.ndarray:
    """Returns 1 per leaf below valid actions only, whatever its answer, float32 `[N]`.

    Args:
      forest: the rollouts.
      per_action: what each action of the rollout costs.
    """
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        actions = [forest.records[node] for node in path_from_root(forest, leaf)[:-1]]
        is_valid = not any(action.parse_error for action in actions)
        reward_N[leaf] = float(is_valid) - per_action * len(actions)
    return reward_N


REWARDS: Mapping[str, Callable[[Forest], np.ndarray]] = MappingProxyType(
    {
        "answer": functools.partial(answer_rewards, metric=cover_match_tokens),
        "format": format_rewards,
        "short": functools.partial(format_rewards, per_action=0.2),
    }
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`.

    Fields:
      system: the system and how it is sampled.
      reward: `answer`: the answer is right; `format`: the actions are valid, whatever the answer;
        `short`: as `format`, and each action costs 0.2, so that no search is best.
      rollouts: per question; they are compared with each other.
    """

    system: C3PO = C3PO()
    reward: str = "answer"
    rollouts: int = 5

    def __post_init__(self) -> None:
        one_of("recipe.reward", self.reward, tuple(REWARDS))


def recipe(settings: Settings) -> Recipe:
    """Returns C-3PO in single chains, with the reward of the settings."""
    paper = paper_recipe(PaperSettings(system=settings.system))
    return dataclasses.replace(
        paper,
        reward=REWARDS[settings.reward],
        expander=Recipe.expander,
        rollouts=settings.rollouts,
        width=1,
    )
