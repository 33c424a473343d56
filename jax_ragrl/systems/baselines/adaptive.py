"""Adaptive-RAG: a classifier sends a question to no retrieval, one search, or IRCoT.

Jeong et al. 2024, "Adaptive-RAG: Learning to Adapt Retrieval-Augmented Large Language Models
through Question Complexity".

Departures from the paper
  1. The labels come from C-3PO's forced strategies instead of three separate systems.
  2. The classifier is a role of the policy, its output masked to the three letters, where the paper
     has a T5. A malformed class counts as B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jax_ragrl.rollout.effects import Generate, Search
from jax_ragrl.rollout.roles import Parsed, Role, malformed
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.baselines.iterative import IRCoT
from jax_ragrl.systems.baselines.rows import Row
from jax_ragrl.systems.baselines.scripted import Chosen, Scripted, Steps, finish
from jax_ragrl.systems.c3po import NO_RETRIEVAL, PLANNING, RETRIEVAL
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import Message, Question, Sampling

CLASSIFIER = "classifier"
NONE, SINGLE, MULTI = "A", "B", "C"
STRATEGIES = {NONE: "none", SINGLE: "single", MULTI: "multi"}
CLASSES = {NO_RETRIEVAL: NONE, RETRIEVAL: SINGLE, PLANNING: MULTI}


def parse_class(text: str) -> Parsed:
    """One of the letters A, B, C and nothing else."""
    letter = text.strip()
    return Parsed(letter) if letter in STRATEGIES else malformed("Invalid Class")


@dataclasses.dataclass(frozen=True)
class AdaptiveRAG(Scripted):
    """Classify, then answer directly, from one search, or by IRCoT."""

    ircot: IRCoT = IRCoT()

    @property
    def roles(self) -> Mapping[str, Role]:
        """The classifier; greedy."""
        role = Role(CLASSIFIER, parse_class, Sampling(0.0, 1.0, 1), tokens="[ABC]")
        return {CLASSIFIER: role}

    def steps(self, question: Question) -> Steps:
        """The class, and what it stands for."""
        parsed = yield Generate(CLASSIFIER, classify(self.style, question))
        chosen = parsed.action if parsed.valid else SINGLE
        yield Chosen(STRATEGIES[chosen])
        if chosen == MULTI:
            loop = dataclasses.replace(self.ircot, style=self.style, top_k=self.top_k)
            yield from loop.steps(question)
        hits = (yield Search(question.text, self.top_k)) if chosen == SINGLE else None
        yield from finish(self.style, question, hits.passages if hits else ())


def classify(style: str, question: Question) -> tuple[Message, ...]:
    """What the classifier reads."""
    return user_turn(style, "classify", question=question.text)


# --- Its training data ---------------------------------------------------------------------------


def cheapest(forest: Forest, reward_N: np.ndarray) -> dict[int, str]:
    """The class of each question: the cheapest of C-3PO's strategies with a right answer.

    Where none was right, questions of several hops are C and others B (the paper's bias by data
    set). Questions whose environment failed have no class.

    Args:
      forest: C-3PO rollouts with all three strategies forced at the router.
      reward_N: float32 `[N]`, positive on right leaves.
    """
    right: dict[int, set[str]] = {i: set() for i in set(forest.question_N.tolist())}
    for node in np.flatnonzero(forest.leaf_N & (reward_N > 0)).tolist():
        leaf = forest.records[node]
        right[leaf.question].add(CLASSES[leaf.state.strategy])
    unsolved = {i: MULTI if forest.questions[i].hops > 1 else SINGLE for i in right}
    return {i: min(right[i], default=unsolved[i]) for i in sorted(right)}


def class_rows(style: str, forest: Forest, reward_N: np.ndarray) -> list[tuple[str, Row]]:
    """One row a question for the classifier, after the question's id; arguments as `cheapest`'s."""
    named = [(forest.questions[i], letter) for i, letter in cheapest(forest, reward_N).items()]
    return [(q.id, Row(classify(style, q), letter, CLASSIFIER)) for q, letter in named]
