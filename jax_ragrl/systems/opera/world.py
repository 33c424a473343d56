"""OPERA in the generated encyclopedia: what is gold, and what an expert would write.

Both read text alone, by the rules of `subgoals`. The expert stands where the paper has the best
candidate of a large model.
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
from jax_ragrl.systems.opera.subgoals import reworded, subgoals, truth
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.types import Passage, Question


def world_gold(question: Question, goal: SubGoal, passages: Sequence[Passage]) -> Gold:
    """What the shown passages themselves tell of a sub-goal, whatever the plan.

    So a sub-goal about a wrongly found entity is judged as it was put. What asks nothing of the
    encyclopedia cannot be answered, and nothing is relevant to it.
    """
    del question
    found = truth(goal.text, passages)
    if found is None:
        return Gold((), (False,) * len(passages), 0)
    return Gold((found.answer,) if found.answer else (), found.relevant, found.total)


@dataclasses.dataclass(frozen=True)
class WorldExpert:
    """The right action of every role, from a prompt of the tiny style."""

    style: str = "opera_tiny"

    def __call__(self, effect: Generate, question: str) -> str | None:
        del question
        return self.write(effect.role, effect.messages[-1].content)

    def write(self, role: str, prompt: str) -> str:
        """The text of an action."""
        asked = question_of(prompt)
        if role == PLAN:
            return render_plan(subgoals(asked) or (asked,))
        if role == ANALYSIS:
            shown = [Passage("", t, text) for t, text in read_numbered(self.style, prompt)]
            return analyse(asked, shown)
        return render_rewrite("rephrase", reworded(asked))


def analyse(goal: str, shown: Sequence[Passage]) -> str:
    """The right verdict on a sub-goal: the fact, and the answer; or that there is nothing."""
    found = truth(goal, shown)
    if found is None or not found.answer:
        return render_analysis("nothing")
    return render_analysis(f"{goal} is {found.answer}", found.answer)
