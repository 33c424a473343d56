"""Self-RAG: reflections decide whether to search, and rank the answers from the passages.

Asai et al. 2024, "Self-RAG: Learning to Retrieve, Generate, and Critique through Self-Reflection".

Departures from the paper
  1. The reflection tokens of a fine-tuned model are yes/no questions to the frozen language model:
     a verdict is 1 or 0; in the paper it is the probability of a token.
  2. Answers are one segment, without a beam over segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Steps, StrategyChoice, all_of
from jax_ragrl.systems.baselines.script import ScriptedSystem, report_fault
from jax_ragrl.types import Question

CRITIQUES = ("relevant", "supported", "useful")


def parse_verdict(text: str) -> ParsedAction:
    """Parses the first word as yes or no."""
    word = text.strip().partition(" ")[0].partition("\n")[0].strip(".,:;!*\"'").lower()
    return ParsedAction(word) if word in ("yes", "no") else invalid_action("Invalid Verdict")


def critique(verdicts: Sequence[bool], weights: Sequence[float]) -> float:
    """Returns the score of a segment: the weighted sum of its verdicts.

      S = sum_c w_c v_c,  c in relevant, supported, useful

    Asai et al. 2024, section 3.3, without the probability of the segment itself.
    """
    return sum(w * v for w, v in zip(weights, verdicts, strict=True))


@dataclasses.dataclass(frozen=True)
class SelfRAG(ScriptedSystem):
    """Decides whether to search, answers from each passage and returns the best-ranked answer.

    `weights` belong to three verdicts: the passage is relevant, it supports the answer, the answer
    is useful. A malformed first verdict leads to a search; a malformed critique counts as no.
    """

    FAULTS = {"Invalid Verdict": "The verdict is neither yes nor no."}

    weights: tuple[float, float, float] = (1.0, 1.0, 0.5)

    def steps(self, question: Question) -> Steps:
        """Decides, searches, answers from all passages at once and gets all verdicts at once."""
        gate = yield from report_fault(parse_verdict((yield self.ask("retrieve", question))))
        yield StrategyChoice("direct" if gate.action == "no" else "retrieve")
        if gate.action == "no":
            yield from self.finish(question, ())
        passages = (yield Search(question.text, self.top_k)).passages
        if not passages:
            yield from self.finish(question, ())
        answers = yield from all_of([self.answer(question, [p]) for p in passages])
        replies = yield from all_of(
            [
                self.ask(name, question, [p], answer=answer.strip())
                for p, answer in zip(passages, answers, strict=True)
                for name in CRITIQUES
            ]
        )
        verdicts = []
        for reply in replies:
            verdict = yield from report_fault(parse_verdict(reply))
            verdicts.append(verdict.action == "yes")
        # Rank the answers; `index` returns the first maximum.
        count = len(CRITIQUES)
        ranks = [
            critique(verdicts[i : i + count], self.weights) for i in range(0, len(verdicts), count)
        ]
        yield Done(answers[ranks.index(max(ranks))], "answered")
