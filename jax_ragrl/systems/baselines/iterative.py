"""Iter-RetGen and IRCoT: the latest text of the language model is the next search query.

Shao et al. 2023, "Enhancing Retrieval-Augmented Large Language Models with Iterative
Retrieval-Generation Synergy"; Trivedi et al. 2023, "Interleaving Retrieval with Chain-of-Thought
Reasoning for Knowledge-Intensive Multi-Step Questions".

Departures from the papers
  1. The generations of Iter-RetGen are answers, not chains of thought, so that the last one comes
     from the same answer prompt as in every other system of a table.
  2. The prompt of IRCoT has no worked examples, and its chain ends with the answer (as in later
     re-implementations). In the paper a separate reader reads the collected passages once more;
     here it does so only if the chain ends without an answer.
"""

from __future__ import annotations

import dataclasses
import re

from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Steps
from jax_ragrl.systems.baselines.script import (
    ScriptedSystem,
    clean_query,
    report_fault,
    unique_passages,
)
from jax_ragrl.types import Question

THOUGHT, ANSWER = "Thought", "Answer"
# A period after an initial, a letter of "U.S." or a title does not end a sentence.
_STOP = r"(?<!\b[A-Z])(?<!\b(?:Dr|Mr|Ms|St|Jr|Sr))(?<!\bMrs)\."
_SENTENCE = re.compile(rf".*?(?:[?!]|{_STOP})(?=\s|$)")
ANSWER_IS = re.compile(r"\banswer is:?\s*", re.IGNORECASE)


def parse_thought(text: str) -> ParsedAction:
    """Parses the first sentence as a thought, or as the answer after "the answer is"."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not line:
        return invalid_action("Empty Thought")
    # A line without a final period is one sentence.
    sentence = _SENTENCE.match(line)
    first = sentence[0] if sentence else line
    match = ANSWER_IS.search(first)
    if not match:
        return ParsedAction(THOUGHT, (first,))
    # Read the rest of the line: an answer may contain periods.
    final = line[match.end() :].strip().removesuffix(".")
    return ParsedAction(ANSWER, (final,)) if final else invalid_action("Empty Answer")


@dataclasses.dataclass(frozen=True)
class IterRetGen(ScriptedSystem):
    """Searches with the previous answer and the question, then answers; `rounds` times."""

    rounds: int = 3

    def steps(self, question: Question) -> Steps:
        """Searches and answers in turn."""
        latest = ""
        for _ in range(self.rounds):
            hits = yield Search(clean_query(f"{latest} {question.text}"), self.top_k)
            latest = yield self.answer(question, hits.passages)
        yield Done(latest, "answered")


@dataclasses.dataclass(frozen=True)
class IRCoT(ScriptedSystem):
    """Alternates one sentence of a chain of thought with one search for that sentence.

    Fields:
      thoughts: the maximum number of sentences.
      max_documents: the maximum number of collected passages, the earliest ones.
    """

    FAULTS = {
        "Empty Thought": "The step of reasoning holds no text.",
        "Empty Answer": "The final answer holds no text.",
    }

    thoughts: int = 8
    max_documents: int = 15

    def steps(self, question: Question) -> Steps:
        """Searches and thinks in turn; asks for the answer if the chain ends without one."""
        hits = yield Search(clean_query(question.text), self.top_k)
        documents, chain = hits.passages[: self.max_documents], ""
        for _ in range(self.thoughts):
            reply = yield self.ask("thought", question, documents, thoughts=chain)
            thought = yield from report_fault(parse_thought(reply))
            if thought.action == ANSWER:
                yield Done(thought.args[0], "answered")
            # The model is greedy: the same prompt would give the same malformed thought again.
            if not thought.valid:
                break
            (sentence,) = thought.args
            chain = f"{chain} {sentence}".strip()
            hits = yield Search(clean_query(sentence), self.top_k)
            documents = unique_passages(documents, hits.passages)[: self.max_documents]
        yield from self.finish(question, documents)
