"""C-3PO: a small proxy between a frozen retriever and a frozen language model.

Chen et al. 2025, "C-3PO: Compact Plug-and-Play Proxy Optimization to Achieve Human-like
Retrieval-Augmented Generation". One policy plays three roles, told apart by instruction: the
router chooses a strategy, the filter chooses among retrieved passages, the decision maker leads a
planned search. Search, roadmap and final answer belong to the environment.

Departures from the paper and its published code
  1. In the mode that allows only `[LLM]`, another action is overwritten in the state, and counted;
     the code corrects a local variable, so that a search was still made. The sampled tokens stay.
  2. A dead branch (malformed action, depth) counts as a leaf of reward 0; the code drops it.
     `dead_leaf="ignore"` restores that.
  3. Both forced texts and forced prefixes are offered for the router (paper: prefix, code: text).
  4. The router may sample beside its forced actions (`free`); in the paper it does not. Then none
     of its own malformed routes is ever seen in training, and what losing strategies lose may go
     there: a run of 48 steps on the embedded default ended with half of its routes malformed.
  5. Clip 0.2, gamma 1, lambda 0.95, KL in the reward and whitening are not given; they are the
     defaults of the trainer that the authors name. So is the clip of values (eq. 10 has the plain
     squared error: `objective.value_loss=plain`). Nor is a temperature: 0.6 is the code's, whose
     sampler is the one that made the demonstrations.
  6. The policy's loss is summed over roles (eq. 6); the critic's is a mean over all tokens.
  7. What is a right answer in training is not said. Here it is one that holds a gold answer, or,
     with a `judge` in the config, one that a language model says is right: the paper's measure.
  8. The code tells the router something about each data set; here `hint` is one for all questions,
     and empty, as in the paper.
  9. A query is what stands around its bracket; in the code, what comes after. The code also reads
     `[ LLM ]` and `[1,]`, which are malformed here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Ask, Done, Effect, Generate, Search
from jax_ragrl.rollout.expand import Forced, Tree
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import Parsed, Role, malformed
from jax_ragrl.systems.base import Recipe, Reply
from jax_ragrl.text.metrics import cover_match
from jax_ragrl.text.prompts import numbered, user_turn
from jax_ragrl.types import Hits, LLMRequest, Message, Passage, Question, Sampling

ROUTER, FILTER, DECISION = "router", "filter", "decision"
NO_RETRIEVAL, RETRIEVAL, PLANNING, LLM = "No Retrieval", "Retrieval", "Planning", "LLM"
MAX_QUERY_WORDS = 100

_BRACKETS = re.compile(r"\[([^\]]*)\]")


# --- Grammars: total functions from text to `Parsed` ---------------------------


def parse_router(text: str) -> Parsed:
    """`[No Retrieval]`, `[Retrieval] query` or `[Planning]`: the first bracket is the action."""
    return _bracketed(text, (NO_RETRIEVAL, RETRIEVAL, PLANNING))


def parse_decision(text: str) -> Parsed:
    """`Thought: ...` and `Action: [Retrieval] query` or `Action: [LLM]`."""
    thought, action = _turn(text)
    if not thought:
        return malformed("Invalid Format")
    return _bracketed(action, (RETRIEVAL, LLM))._replace(thought=thought)


def parse_filter(text: str) -> Parsed:
    """`Thought: ...` and `Action: [i, j]`, numbers from 1; an empty list keeps nothing."""
    thought, action = _turn(text)
    chosen = _BRACKETS.search(action)
    if not thought or not chosen:
        return malformed("Invalid Format")
    items = [item.strip() for item in chosen[1].split(",")] if chosen[1].strip() else []
    # At most nine ASCII digits: `int` itself refuses astronomically long numbers.
    if not all(re.fullmatch(r"[+-]?[0-9]{1,9}", item) for item in items):
        return malformed("Invalid Document Idx")
    numbers = tuple(dict.fromkeys(int(item) for item in items))
    return Parsed("Select", numbers, thought)


def _turn(text: str) -> tuple[str, str]:
    """The thought and the action of a turn; the `Thought:` tag may be missing, `Action:` not."""
    head, tag, action = text.partition("Action:")
    thought = head.partition("Thought:")[2] if "Thought:" in head else head
    return (thought.strip(), action) if tag else ("", "")


def _bracketed(text: str, legal: tuple[str, ...]) -> Parsed:
    found = _BRACKETS.search(text)
    if not found:
        return malformed("Invalid Format")
    rest = text[: found.start()] + " " + text[found.end() :]
    query = " ".join(rest.split()[:MAX_QUERY_WORDS])
    if found[1] not in legal or (found[1] == RETRIEVAL and not query):
        return malformed("Invalid Action")
    return Parsed(found[1], (query,) if found[1] == RETRIEVAL else ())


def render_router(action: str, query: str = "") -> str:
    """The router's text for an action."""
    return f"[{action}] {query}".rstrip()


def render_filter(thought: str, numbers: tuple[int, ...]) -> str:
    """The filter's text for a selection."""
    return f"Thought: {thought}\nAction: [{', '.join(map(str, numbers))}]"


def render_decision(thought: str, action: str, query: str = "") -> str:
    """The decision maker's text for an action."""
    return f"Thought: {thought}\nAction: {render_router(action, query)}"


# --- The state machine --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State:
    """Where one branch stands. `phase` names what it waits for."""

    question: Question
    phase: str = "route"
    depth: int = 1
    query: str = ""
    objective: str = ""
    roadmap: str = ""
    strategy: str = ""
    candidates: tuple[Passage, ...] = ()
    documents: tuple[Passage, ...] = ()
    searched: tuple[str, ...] = ()  # every query so far: its repeats turn the page
    answer: str | None = None
    why: str = ""
    faults: tuple[str, ...] = ()  # what was put right instead of ending the branch


@dataclasses.dataclass(frozen=True)
class C3PO:
    """The system. `strict` kills a selection out of range (training); otherwise it is skipped."""

    style: str = "c3po"
    top_k: int = 10
    max_depth: int = 13
    max_documents: int = 10
    roadmaps: int = 1
    strict: bool = True
    hint: str = ""
    max_tokens: int = 2048
    temperature: float = 0.6

    @property
    def roles(self) -> Mapping[str, Role]:
        """The three trained roles; one shared policy."""
        sampling = Sampling(self.temperature, 1.0, self.max_tokens)
        parsers = {ROUTER: parse_router, FILTER: parse_filter, DECISION: parse_decision}
        return {name: Role(name, parse, sampling) for name, parse in parsers.items()}

    def start(self, question: Question) -> State:
        """The root of a question's tree."""
        return State(question)

    def wants(self, state: State) -> Effect:
        """What the state waits for."""
        match state.phase:
            case "route":
                return self._generate(ROUTER, "router", state, hint=self.hint)
            case "search":
                page = state.searched.count(state.query)
                return Search(state.query, self.top_k, page)
            case "filter":
                name = "filter_objective" if state.objective else "filter"
                return self._generate(FILTER, name, state, objective=state.objective)
            case "plan":
                return Ask(self._request("roadmap", state, 0.3), self.roadmaps)
            case "decide":
                name = "decision_final" if self.must_answer(state) else "decision"
                return self._generate(DECISION, name, state, roadmap=state.roadmap)
            case "answer":
                name = "answer" if state.documents else "answer_direct"
                return Ask(self._request(name, state, 0.0))
            case _:
                return Done(state.answer, state.why)

    def advance(self, state: State, reply: Reply) -> State:
        """The state after a reply."""
        steps: dict[str, Any] = {
            "route": self._routed,
            "search": self._found,
            "filter": self._filtered,
            "plan": self._planned,
            "decide": self._decided,
            "answer": self._answered,
        }
        if isinstance(reply, Parsed) and not reply.valid and not self._overwrites(state, reply):
            return _dead(state, reply.error)
        after = steps[state.phase](state, reply)
        return _dead(state, "Max Depth") if after.depth > self.max_depth else after

    def must_answer(self, state: State) -> bool:
        """Whether only `[LLM]` is offered: too many documents, or too deep for another search."""
        return len(state.documents) > self.max_documents or state.depth > self.max_depth - 4

    def _overwrites(self, state: State, parsed: Parsed) -> bool:
        """Whether an action stands for `[LLM]`: it is another one where only that is offered."""
        wrong = parsed.error == "Invalid Action" or parsed.action == RETRIEVAL
        return state.phase == "decide" and self.must_answer(state) and wrong

    def _routed(self, state: State, parsed: Parsed) -> State:
        state = dataclasses.replace(state, strategy=parsed.action)
        if parsed.action == RETRIEVAL:
            return dataclasses.replace(state, phase="search", query=parsed.args[0])
        if parsed.action == PLANNING:
            return dataclasses.replace(state, phase="plan", depth=state.depth + 1)
        return _to_answer(state)

    def _planned(self, state: State, roadmap: str) -> State:
        return dataclasses.replace(state, phase="decide", roadmap=roadmap, depth=state.depth + 1)

    def _decided(self, state: State, parsed: Parsed) -> State:
        if self._overwrites(state, parsed):
            return _to_answer(_noted(state, "Overwritten Action"))
        if parsed.action == LLM:
            return _to_answer(state)
        return dataclasses.replace(
            state, phase="search", query=parsed.args[0], objective=parsed.thought
        )

    def _found(self, state: State, hits: Hits) -> State:
        return dataclasses.replace(
            state,
            phase="filter",
            candidates=hits.passages,
            searched=(*state.searched, state.query),
            depth=state.depth + 1,
        )

    def _filtered(self, state: State, parsed: Parsed) -> State:
        legal = [i for i in parsed.args if 1 <= i <= len(state.candidates)]
        if len(legal) < len(parsed.args):
            if self.strict:
                return _dead(state, "Hallucinate Document Idx")
            state = _noted(state, "Hallucinate Document Idx")
        chosen = tuple(state.candidates[i - 1] for i in legal)
        state = dataclasses.replace(
            state, documents=accumulate(state.documents, chosen, state.query)
        )
        if state.strategy == PLANNING:
            return dataclasses.replace(state, phase="decide", depth=state.depth + 1)
        return _to_answer(state)

    def _answered(self, state: State, answer: str) -> State:
        return dataclasses.replace(state, phase="done", answer=answer, why="answered")

    def _generate(self, role: str, name: str, state: State, **values: str) -> Generate:
        shown = state.candidates if role == FILTER else state.documents
        return Generate(
            role, self._messages(name, state, numbered(self.style, shown), **values), state.depth
        )

    def _request(self, name: str, state: State, temperature: float) -> LLMRequest:
        messages = self._messages(name, state, numbered(self.style, state.documents))
        return LLMRequest(name, messages, Sampling(temperature, 1.0, 256))

    def _messages(
        self, name: str, state: State, documents: str, **values: str
    ) -> tuple[Message, ...]:
        return user_turn(
            self.style, name, question=state.question.text, documents=documents, **values
        )


def accumulate(
    documents: tuple[Passage, ...], chosen: tuple[Passage, ...], query: str
) -> tuple[Passage, ...]:
    """Adds what a filter chose. Nothing chosen leaves a note; a later success removes the note."""
    note = Passage("", query, "Nothing relevant was found for this query.")
    kept = tuple(d for d in documents if not (chosen and d == note))
    added = chosen or (note,)
    return kept + tuple(p for p in dict.fromkeys(added) if p not in kept)


def _to_answer(state: State) -> State:
    # Assembling the prompt is a node kind of its own in the paper's depth count.
    return dataclasses.replace(state, phase="answer", depth=state.depth + 2)


def _noted(state: State, fault: str) -> State:
    return dataclasses.replace(state, faults=(*state.faults, fault))


def _dead(state: State, why: str) -> State:
    return dataclasses.replace(state, phase="done", answer=None, why=why)


# --- The recipe ---------------------------------------------------------------------------------


SEARCHES = {
    "prefix": Forced(f"[{RETRIEVAL}]", complete=False),
    "text": Forced(f"[{RETRIEVAL}] $question"),
}
SAMPLED = "sampled"


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The rollout (section 5.1) and its credit.

    `retrieval` forces the router's search by `prefix` (the policy writes the query, as in the
    paper) or by `text` (the question is the query, as in the code), and beside its forced actions
    the router samples `free` of its own. With `sampled` nothing is forced, and the router tries as
    many actions as any role: with a width of 1 that is the single trajectory of the paper's
    ablation (section 6.4). `dead_leaf` is `zero` or `ignore`, and `multiplicity` weighs merged
    siblings by their number.
    """

    width: int = 2
    until: int = 4
    free: int = 0
    retrieval: str = "prefix"
    dead_leaf: str = "zero"
    multiplicity: bool = False

    def __post_init__(self) -> None:
        one_of("tree.retrieval", self.retrieval, (*SEARCHES, SAMPLED))
        if self.dead_leaf not in ("zero", "ignore"):
            raise UserError(f"tree.dead_leaf is {self.dead_leaf!r}: it must be zero or ignore")
        if self.free and self.retrieval == SAMPLED:
            raise UserError("tree.free is for a forced router, and tree.retrieval forces nothing")

    def expander(self, roles: frozenset[str] = frozenset()) -> Tree:
        """The tree, with the router's three strategies forced unless it is `sampled`."""
        del roles
        if self.retrieval == SAMPLED:
            return Tree(self.width, self.until)
        search = SEARCHES[self.retrieval]
        forced = (Forced(f"[{NO_RETRIEVAL}]"), search, Forced(f"[{PLANNING}]"))
        return Tree(self.width, self.until, {ROUTER: forced}, self.free)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`."""

    system: C3PO = C3PO()
    tree: TreeShape = TreeShape()


def recipe(settings: Settings) -> Recipe:
    """Tree rollouts, the leaf's accuracy, Monte Carlo credit over reachable leaves."""
    tree = settings.tree
    return Recipe(
        system=settings.system,
        reward=functools.partial(answer_rewards, metric=cover_match),
        credit=functools.partial(
            reachable_leaves,
            ignore_dead=tree.dead_leaf == "ignore",
            multiplicity=tree.multiplicity,
        ),
        expander=tree.expander,
        width=max(tree.width, tree.free),
        inference=dataclasses.replace(settings.system, strict=False, roadmaps=1),
        metric="cover_em",
        judged=True,
    )
