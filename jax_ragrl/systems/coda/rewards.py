"""CoDA's rewards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jax_ragrl.rollout.tree import Record
from jax_ragrl.systems.coda.system import EXECUTOR, PLANNER
from jax_ragrl.systems.tags import (
    ANSWER,
    REFINE,
    SEARCH,
    TASK,
    THINK,
    tag_contents,
    tags_match,
)
from jax_ragrl.text.metrics import cover_match_tokens, f1

# The tags that each role must have written at least once, opened as often as closed.
PLANNER_TAGS, EXECUTOR_TAGS = (THINK, TASK, ANSWER), (THINK, SEARCH, REFINE, ANSWER)


def role_texts(path: Sequence[Record]) -> tuple[str, list[str]]:
    """Returns the text of a rollout's planner, and of each executor, without observations.

    Consecutive executor turns belong to one executor: the planner acts between two of them.
    """
    runs = itertools.groupby((r for r in path if r.parsed), key=lambda record: record.role)
    texts = [(role, "\n".join(r.parsed.text for r in run if r.parsed)) for role, run in runs]
    planner = "\n".join(text for role, text in texts if role == PLANNER)
    return planner, [text for role, text in texts if role == EXECUTOR]


def answer_reward(answer: str | None, answers: Sequence[str]) -> float:
    """Returns R_ans = 6 F1 - 3 (eq. 4 and 5); a missing answer counts as a wrong one."""
    return 6.0 * (0.0 if answer is None else f1(answer, answers)) - 3.0


def format_reward(
    planner: str, executors: Sequence[str], together: bool, tags: Sequence[str] = EXECUTOR_TAGS
) -> float:
    """Returns R_format = I_P + I_E (eq. 6).

    An answer without any task costs the planner's point.

    Args:
      planner: the text of the planner.
      executors: the text of each executor.
      together: whether I_E says that all executors are well formed; otherwise I_E is their share.
      tags: the tags that an executor must have written.
    """
    # Without executors this point is lost.
    well_formed = [tags_match(text, tags) for text in executors] or [False]
    share = float(all(well_formed)) if together else float(np.mean(well_formed))
    return float(tags_match(planner, PLANNER_TAGS)) + share


def refine_reward(executors: Sequence[str], answers: Sequence[str], together: bool) -> float:
    """Returns I(s != "") I(G in s) (eq. 7 and 8): the refined text contains a gold answer.

    It contains the tokens of one, see departure 10 of the recipe.

    Args:
      executors: the text of each executor.
      answers: the gold answers.
      together: whether `s` joins the refined texts of all executors; otherwise the result is 1 if
        the text of any executor contains one.
    """
    texts = [tag_contents(text, REFINE) for text in executors]
    # Joined, an answer may be spread over the refinements of several executors.
    texts = [" ".join(texts)] if together else texts
    return float(any(cover_match_tokens(s, answers) for s in texts if s.strip()))
