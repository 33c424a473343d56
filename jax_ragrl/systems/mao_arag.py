"""MAO-ARAG: a trained planner writes workflows that frozen executors carry out.

Chen et al. 2025, "MAO-ARAG: Multi-Agent Orchestration for Adaptive Retrieval-Augmented Generation".
The planner answers a question with a comma list of executors. Query rewriter, retriever, document
selector and answer generator make up a workflow of their own; a serial or a parallel decomposition
stands alone, and each of its sub-questions gets a planner call and a workflow. Every planner call
earns the F1 of the final answer and pays for what it set in motion.

Departures from the paper and its published code
  1. The grammar (`workflows.py`) has the 16 workflows that end in AG, and the two decompositions
     at first. The code lets AS in where it has no meaning; it runs by itself after sub-questions.
  2. Turn costs are the code's: 0.25 for each sub-question of QDS, 0.25 for QDP. The rows of the
     paper's table 4 are swapped, as its own text shows.
  3. Parallel sub-questions do run at once; the code runs them in turn and prices them as parallel.
  4. A malformed turn is trained on. The code masks those before the first legal plan.
  5. A decomposition pays for the substitutions and the summary that follow, of QDP too (the code
     reads the key of QDS there).
  6. DS before any R has nothing to select from and is skipped; `select_needs_search` makes such a
     plan illegal. QR changes what is searched for, not what is answered.
  7. Where no sub-question has an answer when the turns are over, there is nothing to summarise: the
     rollout is dead.
Costs weigh the same in the paper, and 1 : 0.25 : 0.5 in the code (`code()`), which also puts the
unit of token costs at 5e-4 dollars instead of 6.02e-4.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.credit.assign import shared
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Ask, Done, Effect, Generate, Search
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.rollout.tree import SEARCH, Call, Forest
from jax_ragrl.systems.base import Recipe, nodes_to
from jax_ragrl.systems.workflows import (
    AG,
    DS,
    EXECUTORS,
    QDP,
    QDS,
    QR,
    R,
    parse_plan,
    render_plan,
)
from jax_ragrl.text.metrics import f1
from jax_ragrl.text.prompts import numbered, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

PLANNER, SUB_PLANNER = "planner", "sub_planner"
# Steps that no planner writes: planning itself, substitution of earlier answers, the summary.
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
MAX_PARTS = 4

# --- What executors reply -------------------------------------------------------------------------


def sub_questions(reply: str) -> tuple[str, ...]:
    """One a line, without what numbers or stresses it: not the number that begins a title."""
    lines = (line.replace("**", "").strip() for line in reply.split("\n"))
    bare = (re.sub(r"^(\d{1,2}[.):](?!\d)|[-*](?=\s|$))\s*", "", line) for line in lines)
    return tuple(line for line in bare if line)


def selected(reply: str, documents: tuple[Passage, ...]) -> tuple[Passage, ...]:
    """The documents whose numbers (from 1) are named."""
    numbers = dict.fromkeys(int(i) for i in re.findall(r"(?<![0-9])[0-9]{1,9}(?![0-9])", reply))
    return tuple(documents[i - 1] for i in numbers if 1 <= i <= len(documents))


def one_line(reply: str) -> str:
    """A reply without line breaks, so that no reply can pretend to be more lines of a prompt."""
    return " ".join(reply.split())


def plain_answer(reply: str) -> str:
    """An answer without asterisks and an `answer:` before it."""
    return re.sub(r"^answer\s*:\s*", "", one_line(reply.replace("*", "")), flags=re.IGNORECASE)


# --- The state machine ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Item:
    """A question or sub-question, and the steps still to be made for it.

    `turn` is the planner call whose workflow it runs, which pays; `query` what is searched for,
    where it was rewritten. `answer` is None as long as there is none.
    """

    text: str
    todo: tuple[str, ...] = (PLAN,)
    turn: int = -1
    query: str = ""
    documents: tuple[Passage, ...] = ()
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class State:
    """Where a rollout stands: the whole question first, then its sub-questions, if it has any.

    `turns` counts planner calls; `strategy` is the first legal plan; `faults` are replies of
    executors that could not be taken as they were.
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

    def changed(self, i: int, **changes: Any) -> State:
        """This state with another item `i`."""
        item = dataclasses.replace(self.items[i], **changes)
        return dataclasses.replace(self, items=(*self.items[:i], item, *self.items[i + 1 :]))

    def noted(self, fault: str) -> State:
        """This state with one more fault, if there is one."""
        return dataclasses.replace(self, faults=(*self.faults, fault)) if fault else self


@dataclasses.dataclass(frozen=True)
class MAOARAG:
    """The system. `max_turns` counts planner calls: one plan, and one for each sub-question.

    A workflow that names another than the `executors` is illegal: without `QDP`, for instance, all
    sub-questions come one after the other. What a planner is told of them stands in its prompt: a
    trained one learns from the penalty, one that is not needs a `style` of your own.
    """

    style: str = "mao_arag"
    top_k: int = 5
    max_turns: int = 5
    max_tokens: int = 16
    temperature: float = 1.0
    select_needs_search: bool = False
    executors: tuple[str, ...] = EXECUTORS

    def __post_init__(self) -> None:
        if AG not in self.executors or (unknown := sorted({*self.executors} - {*EXECUTORS})):
            wrong = f"does not hold {AG}" if AG not in self.executors else f"names {unknown[0]!r}"
            raise UserError(
                f"recipe.system.executors {wrong}: use {AG}, which ends every workflow, and "
                f"some of {', '.join(EXECUTORS)}"
            )

    @property
    def roles(self) -> Mapping[str, Role]:
        """The planner before its first legal plan and after; one policy."""
        choices: dict[str, Any] = {
            "select_needs_search": self.select_needs_search,
            "executors": self.executors,
        }
        parse = functools.partial(parse_plan, **choices)
        sampling = Sampling(self.temperature, 1.0, self.max_tokens)
        return {
            PLANNER: Role(PLANNER, functools.partial(parse, first=True), sampling),
            SUB_PLANNER: Role(SUB_PLANNER, functools.partial(parse, first=False), sampling),
        }

    def start(self, question: Question) -> State:
        """The question, to be planned for."""
        return State(question, (Item(question.text),))

    def wants(self, state: State) -> tuple[Effect, ...]:
        """What every item that is at work waits for."""
        return tuple(self._effect(state, i) for i in at_work(state)) or (_done(state),)

    def advance(self, state: State, reply: Any) -> State:
        """The state after a reply to each item that was at work."""
        busy = at_work(state)
        replies = reply if len(busy) > 1 else (reply,)
        for i, one in zip(busy, replies, strict=True):
            state = _planned(state, i, one) if isinstance(one, Parsed) else _took(state, i, one)
        return _within(state, self.max_turns)

    def _effect(self, state: State, i: int) -> Effect:
        item = state.items[i]
        step = item.todo[0]
        if step == PLAN:
            role = SUB_PLANNER if state.strategy else PLANNER
            return Generate(role, self._messages(role, item, state), state.turns + 1)
        if step == R:
            return Search(item.query or item.text, self.top_k, turn=item.turn)
        purpose = PURPOSES[step] if step != AG or item.documents else "answer_direct"
        request = LLMRequest(purpose, self._messages(purpose, item, state), Sampling(0.0, 1.0, 256))
        return Ask(request, turn=state.items[0].turn if step == FILL else item.turn)

    def _messages(self, name: str, item: Item, state: State) -> tuple[Message, ...]:
        pairs = [Passage("", part.text, part.answer or "") for part in answered(state)]
        return user_turn(
            self.style,
            name,
            question=item.text,
            documents=numbered(self.style, item.documents),
            answers=numbered(self.style, pairs, form="pair"),
        )


def answered(state: State) -> list[Item]:
    """The sub-questions that have an answer."""
    return [part for part in state.parts if part.answer is not None]


def at_work(state: State) -> list[int]:
    """The numbers of the items whose next step can be made.

    Sub-questions come before what remains to be done for the whole: one after the other, or, after
    a parallel decomposition, all of them.
    """
    waiting = [i for i, item in enumerate(state.items) if i and item.todo]
    if waiting:
        return waiting if state.strategy == QDP else waiting[:1]
    todo = state.items[0].todo
    return [0] if todo and (todo[0] != AS or answered(state)) else []


def _planned(state: State, i: int, parsed: Parsed) -> State:
    """A planner call: its workflow is to be carried out, or the next call tries again."""
    turn, state = state.turns, dataclasses.replace(state, turns=state.turns + 1)
    if not parsed.valid:
        return state
    plan = parsed.args
    if plan[0] in (QDS, QDP):
        todo = (*plan, AS)
    else:
        todo = tuple(step for n, step in enumerate(plan) if step != DS or R in plan[:n])
    state = state.changed(i, todo=todo, turn=turn)
    return dataclasses.replace(state, strategy=state.strategy or render_plan(plan))


def _took(state: State, i: int, reply: Any) -> State:
    """The reply of an executor, and the step done."""
    item = state.items[i]
    step, todo = item.todo[0], item.todo[1:]
    if step in (QDS, QDP):
        texts = sub_questions(reply)
        wrong = "Too Many Sub-Questions" if len(texts) > MAX_PARTS else ""
        state = state.noted(wrong if texts else "No Sub-Question").changed(i, todo=todo)
        return _split(state, texts[:MAX_PARTS] or (item.text,))
    if step == DS and not selected(reply, item.documents):
        return state.noted("Invalid Selection").changed(i, todo=todo)
    return state.changed(i, todo=todo, **TAKES[step](item, reply))


# What a step's reply changes of its item.
TAKES: Mapping[str, Callable[[Item, Any], dict[str, Any]]] = {
    R: lambda item, hits: {"documents": hits.passages},
    QR: lambda item, text: {"query": one_line(text)},
    DS: lambda item, text: {"documents": selected(text, item.documents)},
    FILL: lambda item, text: {"text": one_line(text) or item.text},
    AG: lambda item, text: {"answer": plain_answer(text)},
    AS: lambda item, text: {"answer": plain_answer(text)},
}


def _split(state: State, texts: Sequence[str]) -> State:
    """Sub-questions: each is planned for, and the later ones of a series are filled in first."""
    fill = state.strategy == QDS
    parts = (Item(text, (FILL, PLAN) if fill and n else (PLAN,)) for n, text in enumerate(texts))
    return dataclasses.replace(state, items=(*state.items, *parts))


def _within(state: State, max_turns: int) -> State:
    """Gives up what no planner call is left for, the last sub-questions first."""
    left = max_turns - state.turns
    for i, item in enumerate(state.items):
        if PLAN in item.todo:
            state = state if left > 0 else state.changed(i, todo=())
            left -= 1
    return state


def _done(state: State) -> Done:
    answer = state.items[0].answer
    if answer is not None:
        whole = len(answered(state)) == len(state.parts)
        return Done(answer, "answered" if whole else "answered, Out Of Turns")
    return Done(None, "No Sub-Answer" if state.strategy else "No Legal Workflow")


# --- Rewards -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a planner call costs: `alpha` times the weighted sum of three terms (eqs. 4 and 6).

    `dollars_in` and `dollars_out` are prices of 1,000 tokens of the frozen model, `dollars_unit`
    what makes a token cost of 1.
    """

    alpha: float = 0.0
    token: float = 1.0
    retrieval: float = 1.0
    turn: float = 1.0
    dollars_in: float = 0.000225
    dollars_out: float = 0.0009
    dollars_unit: float = 6.02e-4


def token_cost(calls: Sequence[Call], costs: Costs) -> float:
    """Dollars of the frozen model over `dollars_unit`."""
    read = sum(call.prompt_tokens for call in calls)
    written = sum(call.completion_tokens for call in calls)
    dollars = (read * costs.dollars_in + written * costs.dollars_out) / 1000
    return dollars / costs.dollars_unit


def retrieval_cost(calls: Sequence[Call]) -> float:
    """1 where the workflow searched."""
    return float(any(call.purpose == SEARCH for call in calls))


def turn_cost(plan: Sequence[str], parts: int) -> float:
    """Latency: 0.25 for each sub-question one after the other, 0.25 for all of them at once."""
    if tuple(plan) == (QDS,):
        return 0.25 * parts
    return 0.25 if tuple(plan) == (QDP,) else 0.0


def own_reward(parsed: Parsed, calls: Sequence[Call], parts: int, costs: Costs) -> float:
    """What a planner call earns itself: -1 for an illegal workflow, and minus its costs.

      R_i = -FP_i - alpha (w_token Token_i + w_retrieval 1[S_i] + w_turn Turn_i)

    Eqs. 4 to 6 without the F1, which is the leaf's.
    """
    price = (
        costs.token * token_cost(calls, costs)
        + costs.retrieval * retrieval_cost(calls)
        + costs.turn * turn_cost(parsed.args, parts)
    )
    return -float(not parsed.valid) - costs.alpha * price


def reward(forest: Forest, costs: Costs) -> np.ndarray:
    """float32 `[N]`: the F1 of each answer on its leaf, `own_reward` on every planner call."""
    reward_N = answer_rewards(forest, f1)
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        end = forest.records[leaf]
        for turn, node in enumerate(nodes_to(forest, leaf)[:-1]):
            parsed = forest.records[node].parsed
            assert parsed is not None, "what stands above a leaf is an action"
            calls = [call for call in end.calls if call.turn == turn]
            reward_N[node] = own_reward(parsed, calls, len(end.state.parts), costs)
    return reward_N


# --- The recipe -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's main result, without costs."""

    system: MAOARAG = MAOARAG()
    costs: Costs = Costs()


def paper() -> Settings:
    """The paper's choices: the three costs weigh the same."""
    return Settings()


def code() -> Settings:
    """The published code's choices."""
    return Settings(costs=Costs(retrieval=0.25, turn=0.5, dollars_unit=5e-4))


def recipe(settings: Settings) -> Recipe:
    """One rollout a question; to each planner call the answer's F1 and its own costs."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(reward, costs=settings.costs),
        credit=shared,
        metric="f1",
        judged=True,
    )
