"""Costs of rollouts: calls, tokens and rounds, per question, per role and per training step."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import numpy as np

from jax_ragrl.rollout.tree import SEARCH, Action, Call, Forest, Record

SIZES = ("calls", "prompt_tokens", "completion_tokens")


def costs_of(forest: Forest) -> list[dict[str, float]]:
    """Returns the costs of each question of an unbranched forest, in the order of the questions.

      retrieval_calls, passages       searches, and the passages that they returned
      llm_calls, llm_prompt_tokens, llm_completion_tokens    the frozen language model
      policy_calls, policy_tokens     the actions of the policy, and their tokens
      peak_context                    the longest prompt with its action, in tokens
      rounds                          sequential batched calls; concurrent effects share a round

    All costs of a failed question are nan.
    """
    costs = []
    for i, leaf in enumerate(forest.leaves()):
        actions = [forest.records[n].action for n in forest.nodes_of(i)]
        costs.append(_cost(leaf, [action for action in actions if action is not None]))
    return costs


def _cost(leaf: Record | None, actions: Sequence[Action]) -> dict[str, float]:
    # A context holds the whole prompt, so the longest pair is the peak, not the sum.
    contexts = [len(action.prompt_ids) + len(action.ids) for action in actions]
    cost = _call_costs(leaf.calls if leaf else ()) | {
        "policy_calls": len(actions),
        "policy_tokens": sum(len(action.ids) for action in actions),
        "peak_context": max(contexts, default=0),
        "rounds": leaf.round if leaf else 0,
    }
    return {name: float(x) if leaf else float("nan") for name, x in cost.items()}


def _call_costs(calls: Sequence[Call]) -> dict[str, int]:
    """Returns the costs of searches and of calls to the frozen language model."""
    llm_calls = [call for call in calls if call.purpose != SEARCH]
    return {
        "retrieval_calls": len(calls) - len(llm_calls),
        "passages": sum(len(call.passages) for call in calls),
        "llm_calls": len(llm_calls),
        "llm_prompt_tokens": sum(call.prompt_tokens for call in llm_calls),
        "llm_completion_tokens": sum(call.completion_tokens for call in llm_calls),
    }


def step_costs(forest: Forest) -> dict[str, float]:
    """Returns the costs of searches and of the frozen language model, summed over a forest.

    A call that several leaves share counts once. The sum leaves out failed questions, branches that
    were not followed, and the judge.
    """
    # Leaves below the same call hold the same object, so its identity distinguishes calls.
    calls = {id(call): call for record in forest.records for call in record.calls}
    return {name: float(x) for name, x in _call_costs([*calls.values()]).items() if x}


def role_costs(forests: Sequence[Forest]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the mean `calls`, `prompt_tokens` and `completion_tokens` per question, by role.

    The roles of the policy are under `policy`, the purposes of calls to the frozen language model
    under `llm`. The forests must be unbranched; failed questions are left out.
    """
    sums: dict[tuple[str, str], np.ndarray] = collections.defaultdict(lambda: np.zeros(len(SIZES)))
    for forest in forests:
        for kind, role, prompt_tokens, completion_tokens in _uses(forest):
            sums[kind, role] += (1, prompt_tokens, completion_tokens)
    # Each question that did not fail has one leaf, since the forests are unbranched.
    num_questions = sum(int(forest.leaf_N.sum()) for forest in forests)
    means: dict[str, dict[str, dict[str, float]]] = {"policy": {}, "llm": {}}
    for (kind, role), total in sums.items():
        mean = (total / num_questions).round(3).tolist()
        means[kind][role] = dict(zip(SIZES, mean, strict=True))
    return means


def _uses(forest: Forest) -> Iterator[tuple[str, str, int, int]]:
    """Yields (kind, role, prompt tokens, completion tokens) of every action and every LLM call."""
    for record in forest.records:
        if record.action is not None:
            yield "policy", record.role, len(record.action.prompt_ids), len(record.action.ids)
        for call in record.calls:
            if call.purpose != SEARCH:
                yield "llm", call.purpose, call.prompt_tokens, call.completion_tokens
