"""ReAct and Search-o1: a language model that searches while it reasons, by prompt alone.

Yao et al. 2023, "ReAct: Synergizing Reasoning and Acting in Language Models"; Li et al. 2025,
"Search-o1: Agentic Search-Enhanced Large Reasoning Models".

Departures from the papers and their code
  1. What a search found is told as a user turn after the model's own, which is cut behind its first
     search; both papers go on writing one text. What the model wrote beyond the cut is dropped.
  2. A conversation that uses up its turns is asked for the answer in the plain words of every
     other system, with the passages that it found; the papers' code then has no answer.
  3. A search that was made before is answered by a reminder in both (ReAct has none).
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar

from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.systems.baselines.scripted import (
    Scripted,
    Steps,
    ask,
    checked,
    clean_query,
    finish,
    merged,
    say,
    told,
)
from jax_ragrl.text.prompts import numbered, user_turn
from jax_ragrl.types import Message, Passage, Question

SEARCH, FINISH = "Search", "Finish"
BEGIN, END = "<|begin_search_query|>", "<|end_search_query|>"
_REACT = re.compile(r"\b(Search|Finish)\[([^\]\n]*)\]")
_MARKED = re.compile(re.escape(BEGIN) + r"(.*?)(?:" + re.escape(END) + r"|$)", re.DOTALL)
# What a box holds ends with its own brace; as `\text{...}` it is what that holds.
_BOX = re.compile(r"\\boxed\{\s*(?:\\text\w*\{([^{}]*)\}|((?:[^{}]|\{[^{}]*\})*))\s*\}")
_ANSWER = re.compile(r"(\\boxed\{.*)|^\W*(?:Final )?Answer\W*:[\s*]*(.*)$", re.MULTILINE)


def parse_react(text: str) -> Parsed:
    """The first `Search[query]` or `Finish[answer]`; `thought` is the text up to its end."""
    found = _REACT.search(text)
    if not found:
        return malformed("No Action")
    said = clean_query(found[2])
    return Parsed(found[1], (said,), text[: found.end()]) if said else malformed("Empty Action")


def parse_marked(text: str) -> Parsed:
    """The first query between the search marks, or else the final answer.

    The answer is what the last `\\boxed{}` or `Answer:` line holds, or else the last line.
    """
    found = _MARKED.search(text)
    if found:
        query = clean_query(found[1])
        upto = text[: found.end(1)] + END
        return Parsed(SEARCH, (query,), upto) if query else malformed("Empty Action")
    marked = _ANSWER.findall(text)
    said = "".join(marked[-1]) if marked else text.strip().rpartition("\n")[2]
    if boxed := _BOX.search(said):
        said = boxed[1] or boxed[2] or ""
    said = said.strip().strip("*").strip()  # emphasis around the label or the answer
    return Parsed(FINISH, (said,), text) if said else malformed("No Action")


@dataclasses.dataclass(frozen=True)
class SearchAgent(Scripted):
    """The loop of both: at most `turns` replies of the model, at most `searches` searches."""

    turns: int = 15
    searches: int = 10
    max_documents: int = 15

    prompt: ClassVar[str]

    @abc.abstractmethod
    def parse(self, text: str) -> Parsed:
        """What a turn asks for; total."""

    def found(
        self, question: Question, query: str, reasoning: str, documents: Sequence[Passage]
    ) -> Steps:
        """What the model is told of a search: the passages themselves."""
        del question, query, reasoning
        yield from ()
        return told(self.style, "agent_found", documents=numbered(self.style, documents))

    def steps(self, question: Question) -> Steps:
        """Turn, search, turn, search, ..."""
        opening = user_turn(self.style, self.prompt, question=question.text)
        talk: tuple[Message, ...] = ()
        searched: tuple[str, ...] = ()
        documents: tuple[Passage, ...] = ()
        for _ in range(self.turns):
            text = yield say(self.prompt, opening + talk)
            parsed = yield from checked(self.parse(text))
            if parsed.action == FINISH:
                yield Done(parsed.args[0], "answered")
            talk += (Message("assistant", parsed.thought or text),)
            query = parsed.args[0] if parsed.valid else ""
            if not parsed.valid:
                reply = told(self.style, f"{self.prompt}_again")
            elif query in searched:
                reply = told(self.style, "agent_repeated", query=query)
            elif len(searched) == self.searches:
                reply = told(self.style, "agent_spent")
            else:
                hits = yield Search(query, self.top_k)
                searched += (query,)
                documents = merged(documents, hits.passages)
                reasoning = "\n".join(message.content for message in talk)
                reply = yield from self.found(question, query, reasoning, hits.passages)
            talk += (reply,)
        yield from finish(self.style, question, documents[: self.max_documents])


@dataclasses.dataclass(frozen=True)
class ReAct(SearchAgent):
    """Thoughts and actions: `Search[query]` shows passages, `Finish[answer]` ends."""

    turns: int = 8

    prompt: ClassVar[str] = "react"

    def parse(self, text: str) -> Parsed:
        """The first action of a turn."""
        return parse_react(text)


@dataclasses.dataclass(frozen=True)
class SearchO1(SearchAgent):
    """Free reasoning with marked queries; a second call reads the passages and tells the gist."""

    prompt: ClassVar[str] = "search_o1"

    def parse(self, text: str) -> Parsed:
        """The first marked query of a turn, or its answer."""
        return parse_marked(text)

    def found(
        self, question: Question, query: str, reasoning: str, documents: Sequence[Passage]
    ) -> Steps:
        """What the language model, reading in the light of the reasoning so far, found useful."""
        values = {"question": question.text, "query": query, "thoughts": reasoning}
        gist = yield ask(self.style, "distil", documents=numbered(self.style, documents), **values)
        return told(self.style, "agent_gist", gist=gist.strip())
