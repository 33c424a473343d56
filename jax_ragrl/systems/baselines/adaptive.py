"""Adaptive-RAG: a classifier sends a question to no retrieval, one search, or IRCoT.

Jeong et al. 2024, "Adaptive-RAG: Learning to Adapt Retrieval-Augmented Large Language Models
through Question Complexity".

Departures from the paper
  1. The labels come from C-3PO's forced strategies instead of three separate systems.
  2. The classifier is a role of the policy with its output masked to the three letters; the paper
     has a T5. A malformed class counts as B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jax_ragrl.rollout.effects import Generate, Search
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.system import Steps, StrategyChoice
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.baselines.examples import ChatExample
from jax_ragrl.systems.baselines.iterative import IRCoT
from jax_ragrl.systems.baselines.script import ScriptedSystem, letter_role
from jax_ragrl.systems.c3po import NO_RETRIEVAL, PLANNING, RETRIEVAL
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import Message, Question

CLASSIFIER = "classifier"
NONE, SINGLE, MULTI = "A", "B", "C"
STRATEGIES = {NONE: "none", SINGLE: "single", MULTI: "multi"}
CLASSES = {NO_RETRIEVAL: NONE, RETRIEVAL: SINGLE, PLANNING: MULTI}


@dataclasses.dataclass(frozen=True)
class AdaptiveRAG(ScriptedSystem):
    """Classifies the question, then answers directly, from one search, or by IRCoT."""

    FAULTS = {"Invalid Class": "The prompt does not offer this class of questions."}

    ircot: IRCoT = IRCoT()

    @property
    def roles(self) -> Mapping[str, Role]:
        return {CLASSIFIER: letter_role(CLASSIFIER, "ABC", "Invalid Class")}

    def steps(self, question: Question) -> Steps:
        """Yields the classification, then the effects of the strategy."""
        label = yield Generate(CLASSIFIER, classify_prompt(self.style, question))
        letter = label.action if label.valid else SINGLE
        yield StrategyChoice(STRATEGIES[letter])
        if letter == MULTI:
            # `ircot` ends with `Done`, so the lines below run for the other classes only.
            ircot = dataclasses.replace(self.ircot, style=self.style, top_k=self.top_k)
            yield from ircot.steps(question)
        hits = (yield Search(question.text, self.top_k)) if letter == SINGLE else None
        yield from self.finish(question, hits.passages if hits else ())


def classify_prompt(style: str, question: Question) -> tuple[Message, ...]:
    return user_turn(style, "classify", question=question.text)


# --- Its training data ---------------------------------------------------------------------------


def cheapest_classes(forest: Forest, reward_N: np.ndarray) -> dict[int, str]:
    """Returns the class of each question: the cheapest of C-3PO's strategies with a right answer.

    If no strategy was right, the class is C for questions of several hops and B for others (the
    paper's bias by data set). Questions whose environment failed have none. The keys are numbers of
    questions, ascending. In the forest all three strategies are forced at the router; `reward_N` is
    positive on right leaves.
    """
    right: dict[int, set[str]] = {i: set() for i in set(forest.question_N.tolist())}
    for node in np.flatnonzero(forest.leaf_N & (reward_N > 0)).tolist():
        leaf = forest.records[node]
        right[leaf.question].add(CLASSES[leaf.state.strategy])
    fallback = {i: MULTI if forest.questions[i].hops > 1 else SINGLE for i in right}
    # The letters are in the order of cost, so the minimum is the cheapest class.
    return {i: min(right[i], default=fallback[i]) for i in sorted(right)}


def classifier_examples(
    style: str, forest: Forest, reward_N: np.ndarray
) -> list[tuple[str, ChatExample]]:
    """Returns a supervised example per question, with its id; arguments as `cheapest_classes`."""
    classes = cheapest_classes(forest, reward_N)
    labels = [(forest.questions[i], letter) for i, letter in classes.items()]
    return [(q.id, ChatExample(classify_prompt(style, q), y, CLASSIFIER)) for q, y in labels]
