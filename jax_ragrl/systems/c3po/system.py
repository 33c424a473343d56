"""C-3PO's grammars and steps; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from jax_ragrl.config.ranges import Count, Positive
from jax_ragrl.rollout.effects import CallLLM, Done, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Fault, Shown, Steps, StrategyChoice, Used
from jax_ragrl.text.patterns import ascending, character, choice, line, visible
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

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


# --- The system --------------------------------------------------------------------------------


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

    FAULTS = {
        "Invalid Format": "The text lacks the form that the prompt demands.",
        "Invalid Action": "The prompt does not offer this action.",
        "Invalid Document Idx": "The selection holds something other than numbers of documents.",
        "Hallucinate Document Idx": "The selection names a document that was not shown.",
        "Overwritten Action": "Another search was asked for when only an answer was offered.",
        "Max Depth": "The rollout reached its largest number of levels without an answer.",
    }

    style: str = "c3po"
    top_k: Count = 10
    max_depth: Count = 13
    max_documents: Count = 10
    roadmaps: Count = 1
    strict: bool = True
    hint: str = ""
    max_tokens: Count = 2048
    temperature: Positive = 0.6
    reply_tokens: Count = 256

    @property
    def roles(self) -> Mapping[str, Role]:
        """The three trained roles, which share one policy."""
        sampling = Sampling(self.temperature, 1.0, self.max_tokens)
        parsers = {ROUTER: parse_router, FILTER: parse_filter, DECISION: parse_decision}
        regexes = strict_grammars(self.top_k)
        return {
            name: Role(name, parse, sampling, action_regex=regexes[name], chooses=name == FILTER)
            for name, parse in parsers.items()
        }

    def steps(self, question: Question) -> Steps:
        """Answers from memory, after one search, or after a planned series of searches."""
        yield StrategyChoice("")
        documents: tuple[Passage, ...] = ()
        queries: list[str] = []
        depth = 1
        # 1. The router chooses the strategy; the frozen model plans a series of searches.
        prompt = self._messages("router", question, (), hint=self.hint)
        route = yield Generate(ROUTER, prompt, depth)
        yield from _dead_unless(route.valid, route.error, depth)
        yield StrategyChoice(route.action)
        planned, roadmap = route.action == PLANNING, ""
        if planned:
            depth = yield from self._descend(depth)
            prompt = self._messages("roadmap", question, ())
            sampling = Sampling(ROADMAP_TEMPERATURE, 1.0, self.reply_tokens)
            roadmap = yield CallLLM(LLMRequest("roadmap", prompt, sampling), self.roadmaps)
            depth = yield from self._descend(depth)
        while route.action != NO_RETRIEVAL:
            # 2. Each planned search is a decision, whose thought the filter reads.
            query, objective = "".join(route.args), ""
            if planned:
                # Another search (1), its filter (1) and the answer (2) take four levels.
                only_llm = len(documents) > self.max_documents or depth > self.max_depth - 4
                name = "decision_final" if only_llm else "decision"
                prompt = self._messages(name, question, documents, roadmap=roadmap)
                decision = yield Generate(DECISION, prompt, depth)
                # Where only `[LLM]` is offered, another action counts as that.
                wrong = decision.error == "Invalid Action" or decision.action == RETRIEVAL
                if only_llm and wrong:
                    yield Fault("Overwritten Action")
                    break
                yield from _dead_unless(decision.valid, decision.error, depth)
                if decision.action == LLM:
                    break
                query, objective = decision.args[0], decision.thought
            # 3. A repeated query would return the same passages, so it returns the next page.
            candidates = (yield Search(query, self.top_k, queries.count(query))).passages
            queries.append(query)
            depth = yield from self._descend(depth)
            # 4. The filter selects passages, which are numbered from 1 in the prompt.
            yield Shown(candidates)
            name = "filter_objective" if objective else "filter"
            prompt = self._messages(name, question, candidates, objective=objective)
            selection = yield Generate(FILTER, prompt, depth)
            yield from _dead_unless(selection.valid, selection.error, depth)
            legal = tuple(candidates[i - 1] for i in selection.args if 1 <= i <= len(candidates))
            if len(legal) < len(selection.args):
                yield from _dead_unless(not self.strict, "Hallucinate Document Idx", depth)
                yield Fault("Hallucinate Document Idx")
            documents = accumulate(documents, legal, query)
            yield Used(documents)
            if not planned:
                break
            depth = yield from self._descend(depth)
        # 5. The assembly of the prompt is a separate node kind in the paper's depth count.
        depth = yield from self._descend(depth, 2)
        # Without documents the model answers from memory, by another prompt.
        name = "answer" if documents else "answer_direct"
        prompt = self._messages(name, question, documents)
        text = yield CallLLM(LLMRequest(name, prompt, Sampling(0.0, 1.0, self.reply_tokens)))
        yield Done(text, "answered", depth)

    def _descend(self, depth: int, levels: int = 1) -> Steps:
        """Returns the depth after some more levels; ends a branch that would be too deep."""
        yield from _dead_unless(depth + levels <= self.max_depth, "Max Depth", depth)
        return depth + levels

    def _messages(
        self, name: str, question: Question, passages: tuple[Passage, ...], **values: str
    ) -> tuple[Message, ...]:
        documents = format_passages(self.style, passages)
        return user_turn(self.style, name, question=question.text, documents=documents, **values)


def _dead_unless(alive: bool, reason: str, depth: int) -> Steps:
    """Ends a branch without an answer, unless it is `alive`."""
    if not alive:
        yield Done(None, reason, depth)


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
