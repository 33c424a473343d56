"""MAO-ARAG's state machine; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import CallLLM, Done, Effect, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import State as BaseState
from jax_ragrl.systems.mao_arag.workflows import (
    AG,
    DS,
    EXECUTORS,
    PLANNER,
    QDP,
    QDS,
    QR,
    SUB_PLANNER,
    R,
    parse_plan,
    plan_regex,
    render_plan,
)
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

# Steps that are not in a plan: the planner call, substitution of earlier answers, the summary.
PLAN, FILL, AS = "plan", "fill", "AS"
PURPOSES = {
    QDS: "decompose_serial",
    QDP: "decompose_parallel",
    FILL: "substitute",
    QR: "rewrite",
    DS: "select",
    AG: "answer",
    AS: "summarise",
}
MAX_PARTS = 4  # sub-questions; further ones are dropped

# --- Replies of executors -------------------------------------------------------------------------


def sub_questions(reply: str) -> tuple[str, ...]:
    """Parses one sub-question per line, without list marks and emphasis.

    A number at the start of a title, such as "1.5 million", stays.
    """
    lines = (line.replace("**", "").strip() for line in reply.split("\n"))
    bare = (re.sub(r"^(\d{1,2}[.):](?!\d)|[-*](?=\s|$))\s*", "", line) for line in lines)
    return tuple(line for line in bare if line)


def select_documents(reply: str, documents: tuple[Passage, ...]) -> tuple[Passage, ...]:
    """Returns the documents whose numbers (from 1) occur in the reply, in its order."""
    # At most nine digits: `int` raises for very long numbers. Duplicates are dropped.
    numbers = dict.fromkeys(int(i) for i in re.findall(r"(?<![0-9])[0-9]{1,9}(?![0-9])", reply))
    return tuple(documents[i - 1] for i in numbers if 1 <= i <= len(documents))


def one_line(reply: str) -> str:
    """Returns a reply on one line, so that it cannot imitate further lines of a prompt."""
    return " ".join(reply.split())


def plain_answer(reply: str) -> str:
    """Returns an answer without asterisks and a leading `answer:`."""
    return re.sub(r"^answer\s*:\s*", "", one_line(reply.replace("*", "")), flags=re.IGNORECASE)


# --- The state machine ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Item:
    """A question or sub-question, and the steps that remain for it.

    Fields:
      text: the text of the question.
      todo: the remaining steps.
      turn: the number of the planner call that wrote its workflow, and that pays for it.
      query: the rewritten query; empty without one.
      documents: the passages for the answer.
      answer: the answer, or None.
    """

    text: str
    todo: tuple[str, ...] = (PLAN,)
    turn: int = -1
    query: str = ""
    documents: tuple[Passage, ...] = ()
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class State(BaseState):
    """The state of a rollout.

    Fields:
      items: the question, then its sub-questions.
      turns: the number of planner calls.
      strategy: the first legal plan.
      faults: the kinds of executor replies that were corrected.
    """

    question: Question
    items: tuple[Item, ...]
    turns: int = 0
    strategy: str = ""
    faults: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Item, ...]:
        """The sub-questions."""
        return self.items[1:]

    def with_item(self, i: int, **changes: Any) -> State:
        """Returns this state with changed fields of item `i`."""
        item = dataclasses.replace(self.items[i], **changes)
        return dataclasses.replace(self, items=(*self.items[:i], item, *self.items[i + 1 :]))

    def with_fault(self, fault: str) -> State:
        """Returns this state with one more fault; unchanged if `fault` is empty."""
        return dataclasses.replace(self, faults=(*self.faults, fault)) if fault else self


@dataclasses.dataclass(frozen=True)
class MAOARAG:
    """The system, and the config section `recipe.system`.

    Fields:
      style: the folder of the prompts. The prompt lists the executors: with fewer `executors` a
        trained planner learns from the penalty, an untrained one needs another style.
      top_k: passages per search.
      max_turns: planner calls: one for the question, and one per sub-question.
      max_tokens: the maximum number of new tokens per plan.
      temperature: the sampling temperature of the planner.
      select_needs_search: whether DS without an earlier R is malformed.
      executors: the executors that a plan may contain; without `QDP`, for example, sub-questions
        are always serial.
      reply_tokens: the maximum number of tokens of an executor's reply.
    """

    style: str = "mao_arag"
    top_k: int = 5
    max_turns: int = 5
    max_tokens: int = 16
    temperature: float = 1.0
    select_needs_search: bool = False
    executors: tuple[str, ...] = EXECUTORS
    reply_tokens: int = 256

    def __post_init__(self) -> None:
        if AG not in self.executors or (unknown := sorted({*self.executors} - {*EXECUTORS})):
            problem = f"lacks {AG}" if AG not in self.executors else f"names {unknown[0]!r}"
            raise UserError(
                f"recipe.system.executors {problem}: use {AG}, which ends every workflow, and "
                f"some of {', '.join(EXECUTORS)}"
            )

    @property
    def roles(self) -> Mapping[str, Role]:
        """The planner before and after its first legal plan, as two roles of one policy."""
        choices: dict[str, Any] = {
            "select_needs_search": self.select_needs_search,
            "executors": self.executors,
        }
        sampling = Sampling(self.temperature, 1.0, self.max_tokens)
        return {
            name: Role(
                name,
                functools.partial(parse_plan, first=name == PLANNER, **choices),
                sampling,
                action_regex=plan_regex(first=name == PLANNER, **choices),
            )
            for name in (PLANNER, SUB_PLANNER)
        }

    def start(self, question: Question) -> State:
        """Returns the state before the first planner call."""
        return State(question, (Item(question.text),))

    def next_effects(self, state: State) -> tuple[Effect, ...]:
        """Returns the next effect of every active item, or `Done`."""
        return tuple(self._effect(state, i) for i in active_items(state)) or (_done(state),)

    def advance(self, state: State, reply: Any) -> State:
        """Returns the state after a reply to each active item."""
        active = active_items(state)
        # A lone reply comes without a tuple around it.
        replies = reply if len(active) > 1 else (reply,)
        for i, one in zip(active, replies, strict=True):
            after = _after_plan if isinstance(one, ParsedAction) else _after_executor
            state = after(state, i, one)
        return _within_turns(state, self.max_turns)

    def _effect(self, state: State, i: int) -> Effect:
        item = state.items[i]
        step = item.todo[0]
        if step == PLAN:
            # The grammar of later planner calls has no decomposition.
            role = SUB_PLANNER if state.strategy else PLANNER
            return Generate(role, self._messages(role, item, state), state.turns + 1)
        if step == R:
            return Search(item.query or item.text, self.top_k, turn=item.turn)
        purpose = PURPOSES[step] if step != AG or item.documents else "answer_direct"
        messages = self._messages(purpose, item, state)
        request = LLMRequest(purpose, messages, Sampling(0.0, 1.0, self.reply_tokens))
        # A substitution serves the decomposition, so the question's planner call pays for it.
        return CallLLM(request, turn=state.items[0].turn if step == FILL else item.turn)

    def _messages(self, name: str, item: Item, state: State) -> tuple[Message, ...]:
        # Answered sub-questions are shown as numbered pairs, like documents.
        pairs = [Passage("", part.text, part.answer or "") for part in answered_parts(state)]
        return user_turn(
            self.style,
            name,
            question=item.text,
            documents=format_passages(self.style, item.documents),
            answers=format_passages(self.style, pairs, form="pair"),
        )


def answered_parts(state: State) -> list[Item]:
    """Returns the sub-questions with an answer."""
    return [part for part in state.parts if part.answer is not None]


def active_items(state: State) -> list[int]:
    """Returns the numbers of the items whose next step can be performed.

    Sub-questions come before the remaining steps of the question: one after the other, or all at
    once after a parallel decomposition.
    """
    waiting = [i for i, item in enumerate(state.items) if i and item.todo]
    if waiting:
        return waiting if state.strategy == QDP else waiting[:1]
    todo = state.items[0].todo
    # Without an answered sub-question there is nothing to summarize.
    return [0] if todo and (todo[0] != AS or answered_parts(state)) else []


def _after_plan(state: State, i: int, action: ParsedAction) -> State:
    """Returns the state after a planner call; after a malformed plan the next call tries again."""
    turn, state = state.turns, dataclasses.replace(state, turns=state.turns + 1)
    # The item keeps its step PLAN, so the next call tries again.
    if not action.valid:
        return state
    plan = action.args
    if plan[0] in (QDS, QDP):
        todo = (*plan, AS)
    else:
        # DS before any R has nothing to select from.
        todo = tuple(step for n, step in enumerate(plan) if step != DS or R in plan[:n])
    state = state.with_item(i, todo=todo, turn=turn)
    return dataclasses.replace(state, strategy=state.strategy or render_plan(plan))


def _after_executor(state: State, i: int, reply: Any) -> State:
    """Returns the state after the reply of an executor."""
    item = state.items[i]
    step, todo = item.todo[0], item.todo[1:]
    if step in (QDS, QDP):
        texts = sub_questions(reply)
        fault = "Too Many Sub-Questions" if len(texts) > MAX_PARTS else ""
        state = state.with_fault(fault if texts else "No Sub-Question").with_item(i, todo=todo)
        # Without sub-questions the question itself is the only one.
        return _split(state, texts[:MAX_PARTS] or (item.text,))
    if step == DS and not select_documents(reply, item.documents):
        return state.with_fault("Invalid Selection").with_item(i, todo=todo)
    return state.with_item(i, todo=todo, **UPDATES[step](item, reply))


# From an item and the reply to one of its steps to the fields of the item that change.
UPDATES: Mapping[str, Callable[[Item, Any], dict[str, Any]]] = {
    R: lambda item, hits: {"documents": hits.passages},
    QR: lambda item, text: {"query": one_line(text)},
    DS: lambda item, text: {"documents": select_documents(text, item.documents)},
    FILL: lambda item, text: {"text": one_line(text) or item.text},
    AG: lambda item, text: {"answer": plain_answer(text)},
    AS: lambda item, text: {"answer": plain_answer(text)},
}


def _split(state: State, texts: Sequence[str]) -> State:
    """Appends sub-questions; later ones of a series start with the substitution of answers."""
    fill = state.strategy == QDS
    parts = (Item(text, (FILL, PLAN) if fill and n else (PLAN,)) for n, text in enumerate(texts))
    return dataclasses.replace(state, items=(*state.items, *parts))


def _within_turns(state: State, max_turns: int) -> State:
    """Drops the steps of items that no planner call is left for, the last items first."""
    remaining = max_turns - state.turns
    for i, item in enumerate(state.items):
        if PLAN in item.todo:
            state = state if remaining > 0 else state.with_item(i, todo=())
            remaining -= 1
    return state


def _done(state: State) -> Done:
    answer = state.items[0].answer
    if answer is not None:
        is_complete = len(answered_parts(state)) == len(state.parts)
        return Done(answer, "answered" if is_complete else "answered, Out Of Turns")
    return Done(None, "No Sub-Answer" if state.strategy else "No Legal Workflow")
