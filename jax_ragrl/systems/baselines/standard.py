"""Direct answering and Standard RAG: a frozen language model alone, and with k passages."""

from __future__ import annotations

import dataclasses

from jax_ragrl.rollout.effects import Search
from jax_ragrl.rollout.system import Steps
from jax_ragrl.systems.baselines.script import ScriptedSystem
from jax_ragrl.types import Question


@dataclasses.dataclass(frozen=True)
class StandardRAG(ScriptedSystem):
    """Retrieves `top_k` passages for the question itself, then answers; 0 is direct answering."""

    style: str = "c3po"
    top_k: int = 10

    def steps(self, question: Question) -> Steps:
        """Yields the search, unless `top_k` is 0, then the request for the answer."""
        hits = (yield Search(question.text, self.top_k)) if self.top_k else None
        yield from self.finish(question, hits.passages if hits else ())


def direct(style: str) -> StandardRAG:
    """Returns direct answering: the language model without passages."""
    return StandardRAG(style, top_k=0)
