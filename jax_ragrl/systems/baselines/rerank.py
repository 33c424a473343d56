"""Reranker: retrieve many passages, let the language model grade each, answer from the best.

Departure from the papers: their rerankers score with a fine-tuned cross-encoder; here the frozen
language model grades every (question, passage) pair separately, from 0 to 10. The cosine of an
encoder would only repeat the order of a dense retriever that uses the same encoder.
"""

from __future__ import annotations

import dataclasses
import re

from jax_ragrl.rollout.effects import Search
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Steps, all_of
from jax_ragrl.systems.baselines.script import ScriptedSystem, report_fault
from jax_ragrl.types import Question

TOP_GRADE = 10
_NUMBER = re.compile(r"[0-9]{1,4}")


def parse_grade(text: str) -> ParsedAction:
    """Parses the first whole number as the grade, 0 to 10."""
    match = _NUMBER.search(text)
    if not match or int(match[0]) > TOP_GRADE:
        return invalid_action("Invalid Grade")
    return ParsedAction("Grade", (int(match[0]),))


@dataclasses.dataclass(frozen=True)
class Reranker(ScriptedSystem):
    """Retrieves `pool * top_k` passages and answers from the `top_k` with the best grades.

    Equal grades stay in the order of the retriever; a malformed grade counts as 0.
    """

    FAULTS = {"Invalid Grade": "The grade of a passage is not a number of the scale."}

    pool: int = 5

    def steps(self, question: Question) -> Steps:
        """Searches, grades each passage (all requests at once) and answers."""
        hits = yield Search(question.text, self.pool * self.top_k)
        replies = yield from all_of([self.ask("grade", question, [p]) for p in hits.passages])
        grades = []
        for reply in replies:
            grade = yield from report_fault(parse_grade(reply))
            grades.append(grade.args[0] if grade.valid else 0)
        # `sorted` is stable, so equal grades stay in the order of the retriever.
        best = sorted(range(len(grades)), key=lambda i: -grades[i])[: self.top_k]
        yield from self.finish(question, [hits.passages[i] for i in best])
