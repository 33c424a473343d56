"""Self-RAG's gating: reflections decide whether to search, and rank what each passage led to.

Asai et al. 2024, "Self-RAG: Learning to Retrieve, Generate, and Critique through Self-Reflection".

Departures from the paper
  1. The reflection tokens of a fine-tuned model are yes/no questions to the frozen language model:
     a verdict is 1 or 0 where the paper has the probability of a token.
  2. An answer is one segment: no beam over segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.systems.baselines.scripted import (
    Chosen,
    Scripted,
    Steps,
    all_of,
    ask,
    checked,
    finish,
)
from jax_ragrl.text.prompts import numbered
from jax_ragrl.types import Question

CRITIQUES = ("relevant", "supported", "useful")


def parse_verdict(text: str) -> Parsed:
    """Yes or no: the first word decides."""
    word = text.strip().partition(" ")[0].partition("\n")[0].strip(".,:;!*\"'").lower()
    return Parsed(word) if word in ("yes", "no") else malformed("Invalid Verdict")


def critique(verdicts: Sequence[bool], weights: Sequence[float]) -> float:
    """How good a segment is: the weighted sum of its verdicts.

      S = sum_c w_c v_c,  c in relevant, supported, useful

    Asai et al. 2024, section 3.3, without the probability of the segment itself.
    """
    return sum(w * v for w, v in zip(weights, verdicts, strict=True))


@dataclasses.dataclass(frozen=True)
class SelfRAG(Scripted):
    """Asks whether to search; answers from each passage alone; returns the answer ranked highest.

    `weights` are those of: is the passage relevant, does it support the answer, is the answer
    useful. Of equal ranks the retriever's order holds. A malformed verdict counts as searching, and
    as no.
    """

    weights: tuple[float, float, float] = (1.0, 1.0, 0.5)

    def steps(self, question: Question) -> Steps:
        """Retrieve? Then an answer from each passage at once, then all verdicts at once."""
        asked = question.text
        reply = yield ask(self.style, "retrieve", question=asked)
        gate = yield from checked(parse_verdict(reply))
        yield Chosen("direct" if gate.action == "no" else "retrieve")
        if gate.action == "no":
            yield from finish(self.style, question, ())
        hits = yield Search(asked, self.top_k)
        if not hits.passages:
            yield from finish(self.style, question, ())
        shown = [numbered(self.style, [p]) for p in hits.passages]
        answers = yield from all_of(
            [ask(self.style, "answer", question=asked, documents=s) for s in shown]
        )
        replies = yield from all_of(
            [
                ask(self.style, name, question=asked, documents=s, answer=a.strip())
                for s, a in zip(shown, answers, strict=True)
                for name in CRITIQUES
            ]
        )
        verdicts = []
        for reply in replies:
            parsed = yield from checked(parse_verdict(reply))
            verdicts.append(parsed.action == "yes")
        count = len(CRITIQUES)
        ranks = [
            critique(verdicts[i : i + count], self.weights) for i in range(0, len(verdicts), count)
        ]
        yield Done(answers[ranks.index(max(ranks))], "answered")
