"""InstructRAG: the generator first explains how the documents lead to the answer.

Wei et al. 2025, "InstructRAG: Instructing Retrieval-Augmented Generation via Self-Synthesized
Rationales". `ragrl warmup sft` fine-tunes the generator on explanations that a language model wrote
with the answers in its prompt (`examples.rationale_examples`); the result serves as the frozen
language model.

Departures from the paper
  1. The answer is the text after the last "the answer is"; the paper scores the full text. Here the
     full text is scored only if that phrase is missing, which counts as a fault.
  2. Documents are in the order of their ranks; the paper's code puts the best document last.
  3. The variant with examples in its prompt is not implemented.
"""

from __future__ import annotations

import dataclasses

from jax_ragrl.rollout.effects import CallLLM, Done, Search
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Steps
from jax_ragrl.systems.baselines.examples import RATIONALE, instruct_prompt
from jax_ragrl.systems.baselines.iterative import ANSWER_IS
from jax_ragrl.systems.baselines.script import ScriptedSystem, report_fault
from jax_ragrl.types import LLMRequest, Question


def parse_rationale(text: str) -> ParsedAction:
    """Parses the text after the last "answer is", up to the end of its line, as the answer."""
    ends = [match.end() for match in ANSWER_IS.finditer(text)]
    answer = text[ends[-1] :].partition("\n")[0].strip().removesuffix(".") if ends else ""
    return ParsedAction("Answer", (answer,), text) if answer else invalid_action("No Answer")


@dataclasses.dataclass(frozen=True)
class InstructRAG(ScriptedSystem):
    """Searches, then explains and answers in one reply; a malformed reply is the answer itself."""

    FAULTS = {"No Answer": "The text holds no answer."}

    def steps(self, question: Question) -> Steps:
        hits = yield Search(question.text, self.top_k)
        messages = instruct_prompt(self.style, question, hits.passages)
        reply = yield CallLLM(LLMRequest("instruct", messages, RATIONALE))
        rationale = yield from report_fault(parse_rationale(reply))
        yield Done(rationale.args[0] if rationale.valid else reply, "answered")
