"""C-3PO's grammars and state machine; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jax_ragrl.rollout.effects import CallLLM, Done, Effect, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Reply
from jax_ragrl.rollout.system import State as BaseState
from jax_ragrl.text.patterns import ascending, character, choice, line, visible
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import Hits, LLMRequest, Message, Passage, Question, Sampling

ROUTER, FILTER, DECISION = "router", "filter", "decision"
NO_RETRIEVAL, RETRIEVAL, PLANNING, LLM = "No Retrieval", "Retrieval", "Planning", "LLM"
MAX_QUERY_WORDS = 100
ROADMAP_TEMPERATURE = 0.3  # several roadmaps have to differ

# From the start of a text to the first closed bracket: a search for the bracket alone would begin
# again at each of many opening ones.
_BRACKETS = re.compile(r"[^\[]*\[([^\]]*)\]")


# --- Grammars: total functions from text to `ParsedAction` --------------------------------------


def parse_router(text: str) -> ParsedAction:
    """Parses `[No Retrieval]`, `[Retrieval] query` or `[Planning]` from the first bracket."""
    return _bracketed(text, (NO_RETRIEVAL, RETRIEVAL, PLANNING))


def parse_decision(text: str) -> ParsedAction:
    """Parses `Thought: ...` and `Action: [Retrieval] query` or `Action: [LLM]`."""
    thought, action = _turn(text)
    if not thought:
        return invalid_action("Invalid Format")
    return _bracketed(action, (RETRIEVAL, LLM))._replace(thought=thought)


def parse_filter(text: str) -> ParsedAction:
    """Parses `Thought: ...` and `Action: [i, j]`, numbers from 1; an empty list selects nothing."""
    thought, action = _turn(text)
    brackets = _BRACKETS.match(action)
    if not thought or not brackets:
        return invalid_action("Invalid Format")
    items = [item.strip() for item in brackets[1].split(",")] if brackets[1].strip() else []
    # At most nine ASCII digits: `int` raises for very long numbers.
    if not all(re.fullmatch(r"[+-]?[0-9]{1,9}", item) for item in items):
        return invalid_action("Invalid Document Idx")
    numbers = tuple(dict.fromkeys(int(item) for item in items))
    return ParsedAction("Select", numbers, thought)


def _turn(text: str) -> tuple[str, str]:
    """Returns the thought and the action; the `Thought:` tag is optional, `Action:` is required."""
    head, tag, action = text.partition("Action:")
    thought = head.partition("Thought:")[2] if "Thought:" in head else head
    return (thought.strip(), action) if tag else ("", "")


def _bracketed(text: str, legal: tuple[str, ...]) -> ParsedAction:
    match = _BRACKETS.match(text)
    if not match:
        return invalid_action("Invalid Format")
    # The query may be before or after its bracket.
    rest = text[: match.start(1) - 1] + " " + text[match.end() :]
    query = " ".join(rest.split()[:MAX_QUERY_WORDS])
    if match[1] not in legal or (match[1] == RETRIEVAL and not query):
        return invalid_action("Invalid Action")
    return ParsedAction(match[1], (query,) if match[1] == RETRIEVAL else ())


def render_router(action: str, query: str = "") -> str:
    """Renders the router's text for an action."""
    return f"[{action}] {query}".rstrip()


def render_filter(thought: str, numbers: tuple[int, ...]) -> str:
    """Renders the filter's text for a selection."""
    return f"Thought: {thought}\nAction: [{', '.join(map(str, numbers))}]"


def render_decision(thought: str, action: str, query: str = "") -> str:
    """Renders the decision maker's text.

    Args:
      thought: the thought before the action.
      action: `RETRIEVAL` or `LLM`.
      query: the query of a search; empty for `LLM`.
    """
    return f"Thought: {thought}\nAction: {render_router(action, query)}"


# --- Strict grammars ----------------------------------------------------------------------------

# The first bracket of a text is its action, so no other text contains one.
_QUERY = line(without="[]")
# Without a colon in its first word, a thought cannot begin with the label of the action.
_THOUGHT = f"{visible('[]:')}+(?: {character('[]')}*)?"


def strict_grammars(top_k: int) -> dict[str, str]:
    """Returns the regular expression of each role's actions, in the form of the renderers.

    Args:
      top_k: the number of candidates that a filter selects from, in ascending order.
    """
    search, turn = rf"\[{RETRIEVAL}\] {_QUERY}", f"Thought: {_THOUGHT}\nAction: "
    numbers = ascending([str(i + 1) for i in range(top_k)], ", ")
    return {
        ROUTER: choice(rf"\[{NO_RETRIEVAL}\]", search, rf"\[{PLANNING}\]"),
        FILTER: rf"{turn}\[(?:{numbers})?\]",
        DECISION: turn + choice(search, rf"\[{LLM}\]"),
    }


# --- The state machine --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State(BaseState):
    """The state of one branch. `phase` names the next effect.

    Fields:
      objective: the thought of the decision that asked for the pending search; the filter reads it.
      roadmap: the plan of the frozen model.
      strategy: the action of the router.
      candidates: the passages that the filter selects from.
      documents: the passages for the answer.
      queries: every query so far; a repeated query returns its next page.
      finish_reason: why the branch ended.
      faults: errors that were corrected instead of ending the branch.
    """

    question: Question
    phase: str = "route"
    depth: int = 1
    query: str = ""
    objective: str = ""
    roadmap: str = ""
    strategy: str = ""
    candidates: tuple[Passage, ...] = ()
    documents: tuple[Passage, ...] = ()
    queries: tuple[str, ...] = ()
    answer: str | None = None
    finish_reason: str = ""
    faults: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class C3PO:
    """The system, and the config section `recipe.system`.

    Fields:
      style: the folder of the prompts.
      top_k: passages per search.
      max_depth: a branch below this depth is dead; each node kind of the paper counts as one.
      max_documents: with more documents than this, only `[LLM]` is offered.
      roadmaps: roadmaps per planned search; each is a branch.
      strict: a selection out of range ends the branch (training); otherwise it is skipped.
      hint: a text for the router about the questions.
      max_tokens: the maximum number of new tokens per action.
      temperature: the sampling temperature of all roles.
      reply_tokens: the maximum number of tokens of a roadmap or an answer of the frozen model.
    """

    style: str = "c3po"
    top_k: int = 10
    max_depth: int = 13
    max_documents: int = 10
    roadmaps: int = 1
    strict: bool = True
    hint: str = ""
    max_tokens: int = 2048
    temperature: float = 0.6
    reply_tokens: int = 256

    @property
    def roles(self) -> Mapping[str, Role]:
        """The three trained roles, which share one policy."""
        sampling = Sampling(self.temperature, 1.0, self.max_tokens)
        parsers = {ROUTER: parse_router, FILTER: parse_filter, DECISION: parse_decision}
        regexes = strict_grammars(self.top_k)
        return {
            name: Role(name, parse, sampling, action_regex=regexes[name])
            for name, parse in parsers.items()
        }

    def start(self, question: Question) -> State:
        """Returns the root of a question's tree."""
        return State(question)

    def next_effects(self, state: State) -> Effect:
        """Returns the effect of the phase."""
        match state.phase:
            case "route":
                return self._generate(ROUTER, "router", state, hint=self.hint)
            case "search":
                # A repeated query would return the same passages, so it returns the next page.
                page = state.queries.count(state.query)
                return Search(state.query, self.top_k, page)
            case "filter":
                # Only a planned search has an objective, the thought of the decision.
                name = "filter_objective" if state.objective else "filter"
                return self._generate(FILTER, name, state, objective=state.objective)
            case "plan":
                request = self._request("roadmap", state, ROADMAP_TEMPERATURE)
                return CallLLM(request, self.roadmaps)
            case "decide":
                name = "decision_final" if self.must_answer(state) else "decision"
                return self._generate(DECISION, name, state, roadmap=state.roadmap)
            case "answer":
                # Without documents the model answers from memory, by another prompt.
                name = "answer" if state.documents else "answer_direct"
                return CallLLM(self._request(name, state, 0.0))
            case _:
                return Done(state.answer, state.finish_reason)

    def advance(self, state: State, reply: Reply) -> State:
        """Returns the state after a reply."""
        transitions: dict[str, Any] = {
            "route": self._after_route,
            "search": self._after_search,
            "filter": self._after_filter,
            "plan": self._after_roadmap,
            "decide": self._after_decision,
            "answer": self._after_answer,
        }
        if isinstance(reply, ParsedAction) and self._is_fatal(state, reply):
            return _dead(state, reply.error)
        # A step to a level below the limit ends the branch; the limit itself is allowed.
        after = transitions[state.phase](state, reply)
        return _dead(state, "Max Depth") if after.depth > self.max_depth else after

    def must_answer(self, state: State) -> bool:
        """Returns whether only `[LLM]` is offered: too many documents, or too deep for a search."""
        # Another search (1), its filter (1) and the answer (2) take four levels.
        return len(state.documents) > self.max_documents or state.depth > self.max_depth - 4

    def _is_fatal(self, state: State, action: ParsedAction) -> bool:
        return not action.valid and not self._overwrites(state, action)

    def _overwrites(self, state: State, action: ParsedAction) -> bool:
        """Returns whether an action counts as `[LLM]`, since only that is offered."""
        wrong = action.error == "Invalid Action" or action.action == RETRIEVAL
        return state.phase == "decide" and self.must_answer(state) and wrong

    def _after_route(self, state: State, route: ParsedAction) -> State:
        state = dataclasses.replace(state, strategy=route.action)
        if route.action == RETRIEVAL:
            return dataclasses.replace(state, phase="search", query=route.args[0])
        if route.action == PLANNING:
            return dataclasses.replace(state, phase="plan", depth=state.depth + 1)
        return _to_answer(state)

    def _after_roadmap(self, state: State, roadmap: str) -> State:
        return dataclasses.replace(state, phase="decide", roadmap=roadmap, depth=state.depth + 1)

    def _after_decision(self, state: State, decision: ParsedAction) -> State:
        if self._overwrites(state, decision):
            return _to_answer(_with_fault(state, "Overwritten Action"))
        if decision.action == LLM:
            return _to_answer(state)
        query, objective = decision.args[0], decision.thought
        return dataclasses.replace(state, phase="search", query=query, objective=objective)

    def _after_search(self, state: State, hits: Hits) -> State:
        return dataclasses.replace(
            state,
            phase="filter",
            candidates=hits.passages,
            queries=(*state.queries, state.query),
            depth=state.depth + 1,
        )

    def _after_filter(self, state: State, selection: ParsedAction) -> State:
        # Documents are numbered from 1 in the prompt.
        legal = [i for i in selection.args if 1 <= i <= len(state.candidates)]
        if len(legal) < len(selection.args):
            if self.strict:
                return _dead(state, "Hallucinate Document Idx")
            state = _with_fault(state, "Hallucinate Document Idx")
        passages = tuple(state.candidates[i - 1] for i in legal)
        documents = accumulate(state.documents, passages, state.query)
        state = dataclasses.replace(state, documents=documents)
        if state.strategy == PLANNING:
            return dataclasses.replace(state, phase="decide", depth=state.depth + 1)
        return _to_answer(state)

    def _after_answer(self, state: State, answer: str) -> State:
        return dataclasses.replace(state, phase="done", answer=answer, finish_reason="answered")

    def _generate(self, role: str, name: str, state: State, **values: str) -> Generate:
        passages = state.candidates if role == FILTER else state.documents
        documents = format_passages(self.style, passages)
        return Generate(role, self._messages(name, state, documents, **values), state.depth)

    def _request(self, name: str, state: State, temperature: float) -> LLMRequest:
        messages = self._messages(name, state, format_passages(self.style, state.documents))
        return LLMRequest(name, messages, Sampling(temperature, 1.0, self.reply_tokens))

    def _messages(
        self, name: str, state: State, documents: str, **values: str
    ) -> tuple[Message, ...]:
        question = state.question.text
        return user_turn(self.style, name, question=question, documents=documents, **values)


def accumulate(
    documents: tuple[Passage, ...], selection: tuple[Passage, ...], query: str
) -> tuple[Passage, ...]:
    """Adds the selection of a filter to the documents, without duplicates.

    An empty selection adds a note instead, which a later non-empty one for the same query removes.

    Args:
      documents: the documents so far.
      selection: the passages that the filter selected.
      query: the query of the search.
    """
    # The note informs later decisions that this query failed.
    note = Passage("", query, "Nothing relevant was found for this query.")
    previous = tuple(d for d in documents if not (selection and d == note))
    new = selection or (note,)
    return previous + tuple(p for p in dict.fromkeys(new) if p not in previous)


def _to_answer(state: State) -> State:
    # The assembly of the prompt is a separate node kind in the paper's depth count.
    return dataclasses.replace(state, phase="answer", depth=state.depth + 2)


def _with_fault(state: State, fault: str) -> State:
    return dataclasses.replace(state, faults=(*state.faults, fault))


def _dead(state: State, reason: str) -> State:
    return dataclasses.replace(state, phase="done", answer=None, finish_reason=reason)
