"""MMOA-RAG's rewards: the answer's reward on leaves, and each role's own penalty on its actions."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jax_ragrl.config.ranges import Count, NotPositive
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.systems.mmoa_rag.system import GENERATOR, MAX_QUERIES, REWRITER
from jax_ragrl.text.metrics import cover_match_tokens, exact_match, f1


def many_queries(text: str) -> bool:
    """Returns whether there are more than four sub-questions (paper, eq. 3)."""
    return sum(bool(line.strip()) for line in text.split("\n")) > MAX_QUERIES


def long_queries(text: str) -> bool:
    """Returns whether sub-questions exceed 300 characters in total, the rule of the code."""
    return sum(len(line.strip()) for line in text.split("\n")) > 300


QUERY_RULES = {"count": many_queries, "characters": long_queries}


@dataclasses.dataclass(frozen=True)
class Penalties:
    """The penalties of the roles for their own faults (eqs. 3, 6 and 9).

    Fields:
      rewriter: for too many queries.
      query_rule: what counts as too many: `count` or `characters`.
      selector: for a malformed selection, a duplicate, or a document that does not exist.
      generator: for an answer of more than `max_answer_words` words.
      max_answer_words: the limit for the generator.
    """

    rewriter: NotPositive = -0.5
    query_rule: str = "count"
    selector: NotPositive = -1.0
    generator: NotPositive = -0.5
    max_answer_words: Count = 30

    def __post_init__(self) -> None:
        if self.query_rule not in QUERY_RULES:
            raise UserError(
                f"recipe.penalties.query_rule is {self.query_rule!r}: use "
                f"{' or '.join(QUERY_RULES)}"
            )


def penalty(record: Record, penalties: Penalties) -> float:
    """Returns the penalty of an action, from its raw text; 0 for most actions."""
    action = record.parsed
    assert action is not None, "only actions are penalised"
    if record.role == REWRITER:
        too_many = QUERY_RULES[penalties.query_rule](action.text)
        return penalties.rewriter if too_many else 0.0
    if record.role == GENERATOR:
        too_long = len(action.text.split()) > penalties.max_answer_words
        return penalties.generator if too_long else 0.0
    in_range = all(i < len(record.state.candidates) for i in action.args)
    # An empty text selects nothing, which is legal.
    wrong = bool(action.text) and not (action.valid and in_range)
    return penalties.selector if wrong else 0.0


def f1_rewards(forest: Forest) -> np.ndarray:
    """Returns the F1 of each answer on its leaf, float32 `[N]`."""
    # As in the code: a space keeps the words of "U.S." apart, deletion would join them.
    return answer_rewards(forest, functools.partial(f1, punct="space"))


def rewriting_rewards(forest: Forest) -> np.ndarray:
    """Returns R = EM + F1 + Hit (Ma et al. 2023) on each leaf, float32 `[N]`.

    Hit is 1 if the passages of the searches contain a gold answer, and -1 otherwise.
    """
    reward_N = answer_rewards(forest, lambda *args: exact_match(*args) + f1(*args))
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        text = "\n".join(passage.text for call in record.calls for passage in call.passages)
        # Hit is 2 [hit] - 1.
        reward_N[leaf] += 2 * cover_match_tokens(text, forest.questions[record.question].answers)
        reward_N[leaf] -= 1
    return reward_N


REWARDS = {"f1": f1_rewards, "em_f1_hit": rewriting_rewards}


def reward(forest: Forest, metric: str, penalties: Penalties) -> np.ndarray:
    """Returns the answer's reward on each leaf and the penalty on each action, float32 `[N]`.

    Args:
      forest: the rollouts.
      metric: the reward of an answer, a key of `REWARDS`.
      penalties: the penalties of the roles.
    """
    reward_N = REWARDS[metric](forest)
    # Leaves have no action and keep the reward of the answer.
    for node, record in enumerate(forest.records):
        if record.parsed is not None:
            reward_N[node] = penalty(record, penalties)
    return reward_N
