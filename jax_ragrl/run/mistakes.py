"""Kinds of mistakes: why the answer of a question is wrong, from its prediction with its trace.

The kinds follow the error analysis of OPERA (Liu et al. 2025, table 11), which people made there.
Here rules decide, so that an answer has one kind:

  malformed        no answer, and an action was malformed
  search_failed    no answer, and the searches have not found all gold passages
  gave_up          no answer, although all gold passages were found
  never_searched   an answer without a search
  premature        an answer before all gold passages were found (a wrong decision to answer)
  misread          an answer after all gold passages were found
  wrong            another mistake, on a question that names no gold passages
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from jax_ragrl.retrieval.measures import names_of
from jax_ragrl.types import Passage

FAULTY_ACTION, SEARCH_FAILED, GAVE_UP = "malformed", "search_failed", "gave_up"
NEVER_SEARCHED, PREMATURE = "never_searched", "premature"
FAULTY_READING, WRONG = "misread", "wrong"
KINDS = (FAULTY_ACTION, SEARCH_FAILED, GAVE_UP, NEVER_SEARCHED, PREMATURE, FAULTY_READING, WRONG)


def mistake_of(prediction: Mapping[str, Any]) -> str:
    """Returns the kind of a mistake; empty if the answer contains a gold answer, or none is known.

    `prediction` is a row of `predictions.prediction_rows`. A question whose environment failed has
    no score, and so no mistake.
    """
    # The most lenient score: a long answer that contains the gold answer counts as correct.
    if prediction["scores"].get("cover_em") != 0.0:
        return ""
    if prediction["answer"] is None:
        if prediction["faults"]:
            return FAULTY_ACTION
        if not prediction["gold_passages"]:
            return WRONG
        return GAVE_UP if has_all_gold(prediction) else SEARCH_FAILED
    # A search may find nothing.
    if not prediction["costs"]["retrieval_calls"]:
        return NEVER_SEARCHED
    if not prediction["gold_passages"]:
        return WRONG
    return FAULTY_READING if has_all_gold(prediction) else PREMATURE


def has_all_gold(prediction: Mapping[str, Any]) -> bool:
    """Returns whether the searches of a prediction found all gold passages that it names."""
    # Gold is named by id or by title, depending on the data set.
    names = names_of(Passage(**passage) for passage in prediction["passages"])
    return bool(prediction["gold_passages"]) and names.issuperset(prediction["gold_passages"])


def count_mistakes(predictions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the number of mistakes by kind, in the order of `KINDS`, without absent kinds."""
    counts = collections.Counter(mistake_of(prediction) for prediction in predictions)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}
