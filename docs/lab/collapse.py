"""Runs of C-3PO that collapse for a known reason, and healthy ones: a system and its config.

    PYTHONPATH=docs/lab ragrl train --config=docs/lab/collapse.py:rate_30 --config.seed=1 \
        --workdir=runs/rate_30-1

The numbers of the guard's page come from such runs (docs/lab/guard.md). A rollout is a single
chain of actions, five per question are compared. With the reward `answer` the reward is right.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from ml_collections import ConfigDict

from jax_ragrl.config.schema import one_of
from jax_ragrl.config.shipped_configs import CONFIGS
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.overrides import load_config
from jax_ragrl.systems.base import Recipe, path_from_root
from jax_ragrl.systems.c3po import C3PO
from jax_ragrl.systems.c3po import Settings as PaperSettings
from jax_ragrl.systems.c3po import recipe as paper_recipe
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


# The reward, the factor of the learning rate, and whether the KL term of the loss has a weight.
KINDS = {
    "healthy": ("answer", 1, True),
    "slow": ("answer", 0.25, True),
    "rate_10": ("answer", 10, True),
    "rate_30": ("answer", 30, True),
    "rate_100": ("answer", 100, True),
    "free": ("answer", 1, False),
    "free_10": ("answer", 10, False),
    "free_30": ("answer", 30, False),
    "free_100": ("answer", 100, False),
    "format": ("format", 2, False),
    "short": ("short", 2, False),
}
# A rate that is too high ruins a policy within four steps; a reward that pays for a form takes ten.
STEPS = dict.fromkeys(KINDS, 4) | {"healthy": 6, "slow": 6, "free": 6, "format": 10, "short": 10}


def get_config(kind: str = "healthy") -> ConfigDict:
    reward, factor, has_kl = KINDS[kind]
    values = load_config(CONFIGS / "tiny" / "c3po.py", [])
    # Not `where=none`: the divergence is measured either way.
    coefficient = 0.005 if has_kl else 0.0
    return ConfigDict(
        values
        | {
            "system": "collapse",
            "recipe": {"system": values["recipe"]["system"], "reward": reward, "rollouts": 5},
            "credit": "rollouts",
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": coefficient},
                "aggregation": "role_sum",
            },
            "optimizer": {"policy_lr": 8e-4 * factor, "epochs": 1, "minibatches": 2},
            "run": values["run"]
            | {"steps": STEPS[kind], "questions_per_step": 4, "dev_questions": 60}
            | {"save_every": 2, "eval_every": 2, "save_trees_every": 100},
            # Four rows per pass, of one length: few programs and little padding.
            "packing": {"row_lengths": (256,), "tokens_per_device": 1024},
        }
    )
