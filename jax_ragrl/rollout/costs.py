"""Costs of rollouts: calls, tokens and rounds, per question, per role and per training step."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jax_ragrl.config.ranges import NotNegative
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.tree import SEARCH, Call, Forest

# The names of `costs_of`.
COSTS = (
    *("retrieval_calls", "tool_calls", "passages"),
    *("llm_calls", "llm_prompt_tokens", "llm_completion_tokens"),
    *("policy_calls", "policy_tokens", "peak_context", "rounds", "dollars"),
)
SIZES = ("calls", "prompt_tokens", "completion_tokens")


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices of the environment, in dollars; without any, no cost is in dollars.

    Fields:
      dollars_per_million_prompt_tokens: for text that the frozen language model reads.
      dollars_per_million_completion_tokens: for text that it writes.
      dollars_per_search: for one search, whatever it returns.
    """

    dollars_per_million_prompt_tokens: NotNegative = 0.0
    dollars_per_million_completion_tokens: NotNegative = 0.0
    dollars_per_search: NotNegative = 0.0

    def __post_init__(self) -> None:
        for name, price in dataclasses.asdict(self).items():
            if not 0 <= price < float("inf"):
                raise UserError(f"{name} is {price}: a price is a finite number, 0 or more")

    def dollars(self, costs: Mapping[str, float]) -> dict[str, float]:
        """Returns `dollars` of some counts, see `costs_of`; nothing if all prices are 0."""
        if not any(dataclasses.astuple(self)):
            return {}
        million_tokens = (
            self.dollars_per_million_prompt_tokens * costs.get("llm_prompt_tokens", 0)
            + self.dollars_per_million_completion_tokens * costs.get("llm_completion_tokens", 0)
        ) / 1e6
        searches = self.dollars_per_search * costs.get("retrieval_calls", 0)
        return {"dollars": float(million_tokens + searches)}


FREE = Prices()


def costs_of(forest: Forest, prices: Prices = FREE) -> list[dict[str, float]]:
    """Returns the costs of each question of an unbranched forest; nan for a failed question.

    retrieval_calls, passages       searches, and the passages that they returned
    tool_calls                      calls of tools, also of a result that was asked for before
    llm_calls, llm_prompt_tokens, llm_completion_tokens    the frozen language model
    policy_calls, policy_tokens     the actions of the policy, and their tokens
    peak_context                    the longest prompt with its action, in tokens
    rounds                          sequential batched calls; concurrent effects share a round
    dollars                         if there are prices: of searches and the language model
    """
    costs = []
    for i, leaf in enumerate(forest.leaves()):
        actions = [a for n in forest.nodes_of(i) if (a := forest.records[n].action) is not None]
        # A context holds the whole prompt, so the longest pair is the peak, not the sum.
        contexts = [len(action.prompt_ids) + len(action.ids) for action in actions]
        counts = _call_costs(leaf.calls if leaf else ()) | {
            "policy_calls": len(actions),
            "policy_tokens": sum(len(action.ids) for action in actions),
            "peak_context": max(contexts, default=0),
            "rounds": leaf.round if leaf else 0,
        }
        cost = {name: float(x) if leaf else float("nan") for name, x in counts.items()}
        costs.append(cost | prices.dollars(cost))
    return costs


def _call_costs(calls: Sequence[Call]) -> dict[str, int]:
    """Returns the costs of searches, of tools and of calls to the frozen language model."""
    llm_calls = [call for call in calls if call.is_of_llm]
    searches = sum(call.purpose == SEARCH for call in calls)
    return {
        "retrieval_calls": searches,
        "tool_calls": len(calls) - searches - len(llm_calls),
        "passages": sum(len(call.passages) for call in calls),
        "llm_calls": len(llm_calls),
        "llm_prompt_tokens": sum(call.prompt_tokens for call in llm_calls),
        "llm_completion_tokens": sum(call.completion_tokens for call in llm_calls),
    }


def step_costs(forest: Forest, prices: Prices = FREE) -> dict[str, float]:
    """Returns the costs of searches and of the frozen language model, summed over a forest.

    A call that several leaves share counts once. The sum leaves out failed questions, branches that
    were not followed, and the judge. Costs of 0 are left out.
    """
    # Leaves below the same call hold the same object, so its identity distinguishes calls.
    calls = {id(call): call for record in forest.records for call in record.calls}
    costs = _call_costs([*calls.values()])
    return {name: float(x) for name, x in costs.items() if x} | prices.dollars(costs)


def role_costs(forests: Sequence[Forest]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the mean `calls`, `prompt_tokens` and `completion_tokens` per question, by role.

    The roles of the policy are under `policy`, the purposes of calls to the frozen language model
    under `llm`. The forests must be unbranched; failed questions are left out.
    """
    sums: dict[tuple[str, str], np.ndarray] = collections.defaultdict(lambda: np.zeros(len(SIZES)))
    for record in (record for forest in forests for record in forest.records):
        if (action := record.action) is not None:
            sums["policy", record.role] += (1, len(action.prompt_ids), len(action.ids))
        for call in record.calls:
            if call.is_of_llm:
                sums["llm", call.purpose] += (1, call.prompt_tokens, call.completion_tokens)
    # Each question that did not fail has one leaf, since the forests are unbranched.
    num_questions = sum(int(forest.leaf_N.sum()) for forest in forests)
    means: dict[str, dict[str, dict[str, float]]] = {"policy": {}, "llm": {}}
    for (kind, role), total in sums.items():
        mean = (total / num_questions).round(3).tolist()
        means[kind][role] = dict(zip(SIZES, mean, strict=True))
    return means
