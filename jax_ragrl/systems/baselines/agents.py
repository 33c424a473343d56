"""ReAct and Search-o1: a prompted language model that searches while it reasons.

Yao et al. 2023, "ReAct: Synergizing Reasoning and Acting in Language Models"; Li et al. 2025,
"Search-o1: Agentic Search-Enhanced Large Reasoning Models".

Departures from the papers and their code
  1. The result of a search is a user turn after the model's own turn, which is cut after its first
     search; in both papers the model continues one text. Text after the cut is dropped.
  2. If the turns are used up, the model gets the answer prompt of every other system with the
     passages so far; the papers' code then has no answer.
  3. A repeated search is answered by a reminder in both (ReAct has no reminder).
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from jax_ragrl.rollout.effects import CallLLM, Done, Search
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Steps
from jax_ragrl.systems.baselines import script
from jax_ragrl.systems.tags import TAG_FAULTS
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question

SEARCH, FINISH = "Search", "Finish"
BEGIN, END = "<|begin_search_query|>", "<|end_search_query|>"
# Replies of frozen models may have any length. Each pattern therefore reads a text once: no part of
# it can match, and fail, from many positions.
_ACTION = re.compile(r"\b(Search|Finish)\[")
_MARKED = re.compile(re.escape(BEGIN) + r"(.*?)(?:" + re.escape(END) + r"|$)", re.DOTALL)
_ANSWER = re.compile(r"(\\boxed\{.*)|^[^\w\n]*(?:Final )?Answer\W*:[\s*]*(.*)$", re.MULTILINE)
# The first whole box, whose braces may be nested once; one with nothing but `\\text{...}` in it
# yields the content of the latter.
_BOXED = re.compile(r"\\boxed\{((?:[^{}]++|\{[^{}]*+\})*+)\}")
_BOXED_TEXT = re.compile(r"\s*\\text\w*\{([^{}]*)\}\s*")


def parse_react(text: str) -> ParsedAction:
    """Parses the first `Search[query]` or `Finish[answer]`; the thought ends with it."""
    start = 0
    for line in text.split("\n"):
        # If no bracket closes the first action of a line, none closes a later one.
        match = _ACTION.search(line)
        end = line.find("]", match.end()) if match else -1
        if match and end >= 0:
            content = script.clean_query(line[match.end() : end])
            if not content:
                return invalid_action("Empty Action")
            return ParsedAction(match[1], (content,), text[: start + end + 1])
        start += len(line) + 1
    return invalid_action("No Action")


def parse_marked(text: str) -> ParsedAction:
    """Parses the first query between the search marks, or else the final answer.

    The answer is the content of the last `\\boxed{}` or `Answer:` line, or else the last line.
    """
    match = _MARKED.search(text)
    if match:
        query = script.clean_query(match[1])
        thought = text[: match.end(1)] + END
        return ParsedAction(SEARCH, (query,), thought) if query else invalid_action("Empty Action")
    lines = _ANSWER.findall(text)
    answer = "".join(lines[-1]) if lines else text.strip().rpartition("\n")[2]
    if box := _BOXED.search(answer):
        inner = _BOXED_TEXT.fullmatch(box[1])
        answer = inner[1] if inner else box[1]
    answer = answer.strip().strip("*").strip()  # emphasis around the label or the answer
    return ParsedAction(FINISH, (answer,), text) if answer else invalid_action("No Action")


@dataclasses.dataclass(frozen=True)
class PromptedAgent(script.ScriptedSystem):
    """The loop of both agents.

    Fields:
      turns: the maximum number of replies of the model.
      searches: the maximum number of searches.
      max_documents: the maximum number of passages in the answer prompt after the last turn.
    """

    FAULTS = TAG_FAULTS

    turns: int = 15
    searches: int = 10
    max_documents: int = 15

    prompt: ClassVar[str]
    parse: ClassVar[staticmethod[[str], ParsedAction]]
    summarizes: ClassVar[bool] = False  # the frozen model sums up the passages of each search

    def steps(self, question: Question) -> Steps:
        """Alternates turns of the model with searches."""
        opening = user_turn(self.style, self.prompt, question=question.text)
        conversation: list[Message] = []
        queries: list[str] = []
        documents: tuple[Passage, ...] = ()
        for _ in range(self.turns):
            # 1. One turn of the model; without an action its full text stays in the conversation.
            request = LLMRequest(self.prompt, (*opening, *conversation), script.GREEDY)
            text = yield CallLLM(request)
            action = yield from script.report_fault(self.parse(text))
            # `Done` ends the script: the rollout never resumes it.
            if action.action == FINISH:
                yield Done(action.args[0], "answered")
            conversation.append(Message("assistant", action.thought or text))
            # 2. The user turn after it: a reminder, or the result of the search.
            if not action.valid:
                reply = self.message(f"{self.prompt}_again")
            elif (query := action.args[0]) in queries:
                reply = self.message("agent_repeated", query=query)
            elif len(queries) == self.searches:
                reply = self.message("agent_spent")
            else:
                hits = yield Search(query, self.top_k)
                queries.append(query)
                documents = script.unique_passages(documents, hits.passages)
                if self.summarizes:
                    thoughts = "\n".join(message.content for message in conversation)
                    values = {"query": query, "thoughts": thoughts}
                    gist = yield self.ask("distil", question, hits.passages, **values)
                    reply = self.message("agent_gist", gist=gist.strip())
                else:
                    shown = format_passages(self.style, hits.passages)
                    reply = self.message("agent_found", documents=shown)
            conversation.append(reply)
        yield from self.finish(question, documents[: self.max_documents])


@dataclasses.dataclass(frozen=True)
class ReAct(PromptedAgent):
    """Thoughts and actions: `Search[query]` shows passages, `Finish[answer]` ends."""

    turns: int = 8

    prompt = "react"
    parse = staticmethod(parse_react)


@dataclasses.dataclass(frozen=True)
class SearchO1(PromptedAgent):
    """Free reasoning with marked queries; a second call summarizes the passages."""

    prompt = "search_o1"
    parse = staticmethod(parse_marked)
    summarizes = True
