"""MAO-ARAG: a trained planner writes workflows that frozen executors carry out."""

from jax_ragrl.systems.mao_arag.recipe import Settings, code, paper, recipe, table_system
from jax_ragrl.systems.mao_arag.rewards import (
    Costs,
    follows_grammar,
    own_reward,
    retrieval_cost,
    reward,
    token_cost,
    turn_cost,
)
from jax_ragrl.systems.mao_arag.system import (
    MAOARAG,
    plain_answer,
    select_documents,
    sub_questions,
)
from jax_ragrl.systems.mao_arag.workflows import PLANNER, SUB_PLANNER

__all__ = [
    "MAOARAG",
    "PLANNER",
    "SUB_PLANNER",
    "Costs",
    "Settings",
    "code",
    "follows_grammar",
    "own_reward",
    "paper",
    "plain_answer",
    "recipe",
    "retrieval_cost",
    "reward",
    "select_documents",
    "sub_questions",
    "table_system",
    "token_cost",
    "turn_cost",
]
