"""CoDA: a planner and an executor on one policy, each with its own context."""

from jax_ragrl.systems.coda.recipe import Settings, code, paper, recipe, reward, table_system, terms
from jax_ragrl.systems.coda.rewards import (
    answer_reward,
    format_reward,
    refine_reward,
    role_texts,
)
from jax_ragrl.systems.coda.system import (
    EXECUTOR,
    EXECUTOR_ACTIONS,
    EXECUTOR_NOTES,
    PLANNER,
    PLANNER_ACTIONS,
    CoDA,
    parse_executor,
    parse_planner,
)

__all__ = [
    "EXECUTOR",
    "EXECUTOR_ACTIONS",
    "EXECUTOR_NOTES",
    "PLANNER",
    "PLANNER_ACTIONS",
    "CoDA",
    "Settings",
    "answer_reward",
    "code",
    "format_reward",
    "paper",
    "parse_executor",
    "parse_planner",
    "recipe",
    "refine_reward",
    "reward",
    "role_texts",
    "table_system",
    "terms",
]
