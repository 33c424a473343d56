"""InstructRAG: the generator first explains how the documents lead to the answer.

Wei et al. 2025, "InstructRAG: Instructing Retrieval-Augmented Generation via Self-Synthesized
Rationales". It is fine-tuned on explanations that a language model wrote for known answers
(`rows.explained_rows`, `ragrl sft`), and given back as the frozen one.

Departures from the paper
  1. The answer is what follows the last "the answer is"; the paper scores the whole text, which is
     done here where that is missing, and counted.
  2. Documents stand in the order of their ranks; the paper's code puts the best last.
  3. The variant that learns from examples in its prompt is left out.
"""

from __future__ import annotations

import dataclasses

from jax_ragrl.rollout.effects import Ask, Done, Search
from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.systems.baselines.iterative import ANSWER_IS
from jax_ragrl.systems.baselines.rows import RATIONALE, instruct
from jax_ragrl.systems.baselines.scripted import Scripted, Steps, checked
from jax_ragrl.types import LLMRequest, Question


def parse_rationale(text: str) -> Parsed:
    """What follows the last "answer is", to the line's end, is the answer."""
    ends = [found.end() for found in ANSWER_IS.finditer(text)]
    said = text[ends[-1] :].partition("\n")[0].strip().removesuffix(".") if ends else ""
    return Parsed("Answer", (said,), text) if said else malformed("No Answer")


@dataclasses.dataclass(frozen=True)
class InstructRAG(Scripted):
    """Search, explain and answer in one reply; of a malformed one the whole text is the answer."""

    def steps(self, question: Question) -> Steps:
        """Search, explain."""
        hits = yield Search(question.text, self.top_k)
        messages = instruct(self.style, question, hits.passages)
        reply = yield Ask(LLMRequest("instruct", messages, RATIONALE))
        parsed = yield from checked(parse_rationale(reply))
        yield Done(parsed.args[0] if parsed.valid else reply, "answered")
