"""Reranker: retrieve many passages, let the language model grade each, answer from the best.

The scorer of the papers' rerankers is a fine-tuned cross-encoder; here the frozen language model
grades every (question, passage) pair on its own, from 0 to 10. An encoder's cosine would only
repeat the order of a dense retriever that uses the same encoder.
"""

from __future__ import annotations

import dataclasses
import re

from jax_ragrl.rollout.effects import Search
from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.systems.baselines.scripted import Scripted, Steps, all_of, ask, checked, finish
from jax_ragrl.text.prompts import numbered
from jax_ragrl.types import Question

TOP_GRADE = 10
_NUMBER = re.compile(r"[0-9]{1,4}")


def parse_grade(text: str) -> Parsed:
    """The first whole number, 0 to 10."""
    found = _NUMBER.search(text)
    if not found or int(found[0]) > TOP_GRADE:
        return malformed("Invalid Grade")
    return Parsed("Grade", (int(found[0]),))


@dataclasses.dataclass(frozen=True)
class Reranker(Scripted):
    """Retrieves `pool * top_k` passages and answers from the `top_k` of the best grades.

    Of equal grades the retriever's order holds; a malformed grade counts as 0.
    """

    pool: int = 5

    def steps(self, question: Question) -> Steps:
        """Search, one grade a passage (all at once), answer."""
        hits = yield Search(question.text, self.pool * self.top_k)
        shown = [numbered(self.style, [p]) for p in hits.passages]
        replies = yield from all_of(
            [ask(self.style, "grade", question=question.text, documents=s) for s in shown]
        )
        grades = []
        for reply in replies:
            parsed = yield from checked(parse_grade(reply))
            grades.append(parsed.args[0] if parsed.valid else 0)
        # A stable sort: of equal grades the retriever's order holds.
        ranked = sorted(range(len(grades)), key=lambda i: -grades[i])[: self.top_k]
        yield from finish(self.style, question, [hits.passages[i] for i in ranked])
