"""What rollouts cost: calls, tokens and rounds, of each question, of each role, of a step."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import numpy as np

from jax_ragrl.rollout.tree import SEARCH, Action, Call, Forest, Record

SIZES = ("calls", "prompt_tokens", "completion_tokens")


def costs_of(forest: Forest) -> list[dict[str, float]]:
    """What each question of an unbranched forest cost, in the order of the questions.

      retrieval_calls, passages       searches, and what they returned
      llm_calls, llm_prompt_tokens, llm_completion_tokens    the frozen language model
      policy_calls, policy_tokens     the policy's actions and their tokens
      peak_context                    the longest prompt and action together, in tokens
      rounds                          batched calls in sequence: what runs at once counts once

    All nan where the environment failed.
    """
    costs = []
    for i, leaf in enumerate(forest.ends()):
        actions = [forest.records[n].action for n in forest.nodes_of(i)]
        costs.append(_cost(leaf, [action for action in actions if action is not None]))
    return costs


def _cost(leaf: Record | None, actions: Sequence[Action]) -> dict[str, float]:
    contexts = [len(action.prompt_ids) + len(action.ids) for action in actions]
    cost = _asked(leaf.calls if leaf else ()) | {
        "policy_calls": len(actions),
        "policy_tokens": sum(len(action.ids) for action in actions),
        "peak_context": max(contexts, default=0),
        "rounds": leaf.round if leaf else 0,
    }
    return {name: float(x) if leaf else float("nan") for name, x in cost.items()}


def _asked(calls: Sequence[Call]) -> dict[str, int]:
    """What searches and the frozen language model were asked, and what they said."""
    told = [call for call in calls if call.purpose != SEARCH]
    return {
        "retrieval_calls": len(calls) - len(told),
        "passages": sum(len(call.found) for call in calls),
        "llm_calls": len(told),
        "llm_prompt_tokens": sum(call.prompt_tokens for call in told),
        "llm_completion_tokens": sum(call.completion_tokens for call in told),
    }


def step_costs(forest: Forest) -> dict[str, float]:
    """What all rollouts of a step asked of searches and the frozen language model, summed.

    A call that several leaves go back to counts once. Not counted are questions that failed,
    branches that nobody followed, and a judge.
    """
    calls = {id(call): call for record in forest.records for call in record.calls}
    return {name: float(x) for name, x in _asked([*calls.values()]).items() if x}


def role_costs(forests: Sequence[Forest]) -> dict[str, dict[str, dict[str, float]]]:
    """The mean `calls`, `prompt_tokens` and `completion_tokens` of a question, by role.

    Under `policy` of the roles that the policy plays, under `llm` of what the frozen language model
    is asked for. Forests are unbranched; questions whose environment failed are left out.
    """
    sums: dict[tuple[str, str], np.ndarray] = collections.defaultdict(lambda: np.zeros(len(SIZES)))
    for forest in forests:
        for kind, role, read, written in _uses(forest):
            sums[kind, role] += (1, read, written)
    known = sum(int(forest.leaf_N.sum()) for forest in forests)
    means: dict[str, dict[str, dict[str, float]]] = {"policy": {}, "llm": {}}
    for (kind, role), total in sums.items():
        each = (total / known).round(3).tolist()
        means[kind][role] = dict(zip(SIZES, each, strict=True))
    return means


def _uses(forest: Forest) -> Iterator[tuple[str, str, int, int]]:
    """Every action and every reply: whose, of which role, the tokens read and written."""
    for record in forest.records:
        if record.action is not None:
            yield "policy", record.role, len(record.action.prompt_ids), len(record.action.ids)
        for call in record.calls:
            if call.purpose != SEARCH:
                yield "llm", call.purpose, call.prompt_tokens, call.completion_tokens
