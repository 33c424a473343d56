"""Iter-RetGen and IRCoT: what the language model wrote last is the next search query.

Shao et al. 2023, "Enhancing Retrieval-Augmented Large Language Models with Iterative
Retrieval-Generation Synergy"; Trivedi et al. 2023, "Interleaving Retrieval with Chain-of-Thought
Reasoning for Knowledge-Intensive Multi-Step Questions".

Departures from the papers
  1. Iter-RetGen's generations are answers, not chains of thought, so that its last one is the
     answer that every system of a table is asked for in the same words.
  2. IRCoT's prompt has no worked examples, and its own chain ends with the answer (as in later
     re-implementations); the paper reads the collected passages once more with a separate reader,
     which is done here only where the chain did not come to an answer.
"""

from __future__ import annotations

import dataclasses
import re

from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.systems.baselines.scripted import (
    Scripted,
    Steps,
    answer,
    ask,
    checked,
    clean_query,
    finish,
    merged,
)
from jax_ragrl.text.prompts import numbered
from jax_ragrl.types import Question

THOUGHT, ANSWER = "Thought", "Answer"
# A full stop after an initial, a letter of "U.S." or a title ends no sentence.
_STOP = r"(?<!\b[A-Z])(?<!\b(?:Dr|Mr|Ms|St|Jr|Sr))(?<!\bMrs)\."
_SENTENCE = re.compile(rf".*?(?:[?!]|{_STOP})(?=\s|$)")
ANSWER_IS = re.compile(r"\banswer is:?\s*", re.IGNORECASE)


def parse_thought(text: str) -> Parsed:
    """The first sentence; what follows "the answer is" in it is the answer, to the line's end."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not line:
        return malformed("Empty Thought")
    sentence = _SENTENCE.match(line)
    first = sentence[0] if sentence else line
    found = ANSWER_IS.search(first)
    if not found:
        return Parsed(THOUGHT, (first,))
    said = line[found.end() :].strip().removesuffix(".")
    return Parsed(ANSWER, (said,)) if said else malformed("Empty Answer")


@dataclasses.dataclass(frozen=True)
class IterRetGen(Scripted):
    """`rounds` times: search with the previous answer and the question, answer."""

    rounds: int = 3

    def steps(self, question: Question) -> Steps:
        """Search, answer, search, answer, ..."""
        said = ""
        for _ in range(self.rounds):
            hits = yield Search(clean_query(f"{said} {question.text}"), self.top_k)
            said = yield from answer(self.style, question, hits.passages)
        yield Done(said, "answered")


@dataclasses.dataclass(frozen=True)
class IRCoT(Scripted):
    """One sentence of a chain of thought, one search with it, at most `thoughts` times.

    At most `max_documents` passages are collected, the first ones found.
    """

    thoughts: int = 8
    max_documents: int = 15

    def steps(self, question: Question) -> Steps:
        """Search, think, search, think, ...; the plain question where no answer came of it."""
        hits = yield Search(clean_query(question.text), self.top_k)
        documents, chain = hits.passages[: self.max_documents], ""
        for _ in range(self.thoughts):
            shown = numbered(self.style, documents)
            values = {"question": question.text, "documents": shown, "thoughts": chain}
            reply = yield ask(self.style, "thought", **values)
            parsed = yield from checked(parse_thought(reply))
            if parsed.action == ANSWER:
                yield Done(parsed.args[0], "answered")
            if not parsed.valid:
                break
            (sentence,) = parsed.args
            chain = f"{chain} {sentence}".strip()
            hits = yield Search(clean_query(sentence), self.top_k)
            documents = merged(documents, hits.passages)[: self.max_documents]
        yield from finish(self.style, question, documents)
