"""MAO-ARAG's rewards: the answer's F1 on leaves, format and costs on planner calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jax_ragrl.config.ranges import NotNegative, Positive
from jax_ragrl.config.schema import one_of
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.rollout.tree import SEARCH, Call, Forest
from jax_ragrl.systems.base import path_from_root
from jax_ragrl.systems.mao_arag.system import PURPOSES, parts_of
from jax_ragrl.systems.mao_arag.workflows import PLANNER, QDP, QDS
from jax_ragrl.text.metrics import f1

DECOMPOSITIONS = (PURPOSES[QDS], PURPOSES[QDP])
# The decomposition that waits for each of its sub-questions, by table; the other one waits once.
SERIAL: Mapping[str, str] = {"code": QDS, "paper": QDP}


@dataclasses.dataclass(frozen=True)
class Costs:
    """The cost of a planner call: `alpha` times the weighted sum of three terms (eqs. 4 and 6).

    Fields:
      alpha: the weight of all costs; 0 removes them.
      token_weight, retrieval_weight, turn_weight: the weights of the three terms.
      dollars_per_1k_prompt_tokens: the price of the frozen model for the text that it reads.
      dollars_per_1k_completion_tokens: its price for the text that it writes.
      dollars_per_cost_unit: the price that counts as a token cost of 1.
      turn_table: `code` charges 0.25 per sub-question of QDS and 0.25 for QDP, as the code and the
        text of the paper do; `paper` swaps both rows, as its table 4 is printed.
    """

    alpha: NotNegative = 0.0
    token_weight: NotNegative = 1.0
    retrieval_weight: NotNegative = 1.0
    turn_weight: NotNegative = 1.0
    dollars_per_1k_prompt_tokens: NotNegative = 0.000225
    dollars_per_1k_completion_tokens: NotNegative = 0.0009
    dollars_per_cost_unit: Positive = 6.02e-4
    turn_table: str = "code"

    def __post_init__(self) -> None:
        one_of("recipe.costs.turn_table", self.turn_table, tuple(SERIAL))


def token_cost(calls: Sequence[Call], costs: Costs) -> float:
    """Returns the price of the frozen model's tokens in units of `dollars_per_cost_unit`."""
    prompt_tokens = sum(call.prompt_tokens for call in calls)
    completion_tokens = sum(call.completion_tokens for call in calls)
    dollars = (
        prompt_tokens * costs.dollars_per_1k_prompt_tokens
        + completion_tokens * costs.dollars_per_1k_completion_tokens
    ) / 1000
    return dollars / costs.dollars_per_cost_unit


def retrieval_cost(calls: Sequence[Call]) -> float:
    """Returns 1 if the workflow searched."""
    return float(any(call.purpose == SEARCH for call in calls))


def turn_cost(plan: Sequence[str], parts: int, table: str = "code") -> float:
    """Returns the latency: 0.25 per serial sub-question, 0.25 for all parallel ones.

    Args:
      plan: the executors of the planner call.
      parts: the number of sub-questions.
      table: `Costs.turn_table`.
    """
    if tuple(plan) not in ((QDS,), (QDP,)):
        return 0.0
    # Serial sub-questions wait for each other; parallel ones wait once.
    return 0.25 * parts if plan[0] == SERIAL[table] else 0.25


def own_reward(action: ParsedAction, calls: Sequence[Call], parts: int, costs: Costs) -> float:
    """Returns the immediate reward of a planner call: -1 for an illegal workflow, minus its costs.

      R_i = -FP_i - alpha (w_token Token_i + w_retrieval 1[S_i] + w_turn Turn_i)

    Eqs. 4 to 6 without the F1, which is the reward of the leaf.

    Args:
      action: the planner's action.
      calls: the calls to the environment that it pays for.
      parts: the number of sub-questions of the rollout.
      costs: weights and prices.
    """
    # A malformed call sets nothing in motion, so its price is 0.
    price = (
        costs.token_weight * token_cost(calls, costs)
        + costs.retrieval_weight * retrieval_cost(calls)
        + costs.turn_weight * turn_cost(action.args, parts, costs.turn_table)
    )
    return -float(not action.valid) - costs.alpha * price


def follows_grammar(forest: Forest) -> np.ndarray:
    """Returns False at malformed planner calls before the first legal plan, bool `[N]`."""
    return np.array(
        [r.role != PLANNER or r.parsed is None or r.parsed.valid for r in forest.records], bool
    )


def reward(forest: Forest, costs: Costs) -> np.ndarray:
    """Returns the F1 of answers on leaves and `own_reward` on planner calls, float32 `[N]`."""
    reward_N = answer_rewards(forest, f1)
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        end = forest.records[leaf]
        # The frozen model decomposes at most once per rollout.
        texts = [call.reply for call in end.calls if call.purpose in DECOMPOSITIONS]
        parts = sum(len(parts_of(text, "")) for text in texts)
        for turn, node in enumerate(path_from_root(forest, leaf)[:-1]):
            action = forest.records[node].parsed
            assert action is not None, "a node above a leaf is an action"
            # The leaf records all calls, each with the number of the planner call that pays.
            calls = [call for call in end.calls if call.turn == turn]
            reward_N[node] = own_reward(action, calls, parts, costs)
    return reward_N
