"""OPERA in the synthetic corpus: the gold of sub-goals, and the actions of an expert.

Both are computed from text alone, by the rules of `subgoals`. The expert takes the place of the
best candidate of a large model in the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_ragrl.llm.reader import question_of
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.systems.opera.grammar import (
    ANALYSIS,
    PLAN,
    render_analysis,
    render_plan,
    render_rewrite,
)
from jax_ragrl.systems.opera.rewards import Gold, SubGoal
from jax_ragrl.systems.opera.subgoals import as_query, read_truth, subgoals
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import Passage, Question


def world_gold(question: Question, goal: SubGoal, passages: Sequence[Passage]) -> Gold:
    """Returns the gold of a sub-goal from the passages themselves, independent of the plan.

    A sub-goal about a wrong entity is therefore judged by its own text. Text that is not a sub-goal
    has no answer, and no passage is relevant to it.

    Args:
      question: ignored; the sub-goal determines the gold.
      goal: the sub-goal.
      passages: the passages in the prompt.
    """
    del question
    truth = read_truth(goal.text, passages)
    if truth is None:
        return Gold((), (False,) * len(passages), 0)
    return Gold((truth.answer,) if truth.answer else (), truth.relevant, truth.total)


@dataclasses.dataclass(frozen=True)
class WorldExpert:
    """The right action of every role for a prompt of the tiny style."""

    style: str = "opera_tiny"

    def __call__(self, effect: Generate, question: str) -> str | None:
        del question
        return self.write(effect.role, effect.messages[-1].content)

    def write(self, role: str, prompt: str) -> str:
        """Returns the text of the right action of a role for a prompt."""
        goal = question_of(prompt)
        if role == PLAN:
            return render_plan(subgoals(goal) or (goal,))
        if role == ANALYSIS:
            pairs = parse_passages(self.style, prompt)
            return write_analysis(goal, [Passage("", title, text) for title, text in pairs])
        return render_rewrite("rephrase", as_query(goal))


def write_analysis(goal: str, passages: Sequence[Passage]) -> str:
    """Returns the right verdict on a sub-goal: the fact and the answer, or that there is none."""
    truth = read_truth(goal, passages)
    # A `no` is the right verdict, with any analysis.
    if truth is None or not truth.answer:
        return render_analysis("nothing")
    return render_analysis(f"{goal} is {truth.answer}", truth.answer)
