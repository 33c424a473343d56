"""MAO-ARAG's steps; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ragrl.config.ranges import Count, Positive
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import CallLLM, Done, Effect, Generate, Search
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.system import Fault, Steps, StrategyChoice, all_of
from jax_ragrl.systems.mao_arag import workflows
from jax_ragrl.systems.mao_arag.workflows import AG, DS, EXECUTORS, PLANNER, QDP, QDS, QR, R
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Passage, Question, Sampling

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


def parts_of(reply: str, question: str) -> tuple[str, ...]:
    """Returns the sub-questions to answer; without any, the question itself is the only one."""
    return sub_questions(reply)[:MAX_PARTS] or (question,)


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


# --- The system -----------------------------------------------------------------------------------


@dataclasses.dataclass
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

    FAULTS = {
        "Empty Workflow": "The workflow lists no executor.",
        "Unknown Executor": "The workflow names an executor that does not exist.",
        "Repeated Executor": "The workflow lists the same executor twice.",
        "Decomposed Twice": "A sub-question was decomposed again, which is allowed once.",
        "Decomposition Not Alone": "A workflow lists a decomposition and other executors.",
        "Nothing To Select From": "The workflow selects documents before it has searched for any.",
        "No Answer At The End": "The workflow does not end with the executor that answers.",
        "No Legal Workflow": "The planner wrote no workflow that can be executed.",
        "No Sub-Question": "The decomposition holds no sub-question.",
        "Too Many Sub-Questions": "The decomposition has more sub-questions than are accepted.",
        "Invalid Selection": "None of the selected documents was shown.",
        "No Sub-Answer": "No sub-question has an answer.",
        "Out Of Turns": "The planner's turns were spent before every sub-question had an answer.",
    }

    style: str = "mao_arag"
    top_k: Count = 5
    max_turns: Count = 5
    max_tokens: Count = 16
    temperature: Positive = 1.0
    select_needs_search: bool = False
    executors: tuple[str, ...] = EXECUTORS
    reply_tokens: Count = 256

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
        sampling, roles = Sampling(self.temperature, 1.0, self.max_tokens), {}
        for name in (PLANNER, workflows.SUB_PLANNER):
            parse = functools.partial(workflows.parse_plan, first=name == PLANNER, **choices)
            regex = workflows.plan_regex(first=name == PLANNER, **choices)
            roles[name] = Role(name, parse, sampling, action_regex=regex)
        return roles

    def steps(self, question: Question) -> Steps:
        """Carries out the workflow of the question, or those of its sub-questions."""
        yield StrategyChoice("")
        strategy, turns = "", 0  # the first legal plan, and the number of planner calls
        items = [Item(question.text)]  # the question, then its sub-questions
        while active := active_items(items, strategy):
            # 1. One effect per item that can proceed.
            replies = yield from all_of([self._effect(i, items, strategy, turns) for i in active])
            for item, reply in zip(active, replies, strict=True):
                # 2. A plan; after a malformed one the item keeps its step, and tries again.
                if item.todo[0] == PLAN:
                    if reply.valid:
                        item.turn, item.todo = turns, steps_of(reply.args)
                    if reply.valid and not strategy:
                        strategy = workflows.render_plan(reply.args)
                        yield StrategyChoice(strategy)
                    turns += 1
                    continue
                # 3. Or the reply of an executor.
                step, item.todo = item.todo[0], item.todo[1:]
                if step == R:
                    item.documents = reply.passages
                elif step == QR:
                    item.query = one_line(reply)
                elif step == FILL:
                    item.text = one_line(reply) or item.text
                elif step in (AG, AS):
                    item.answer = plain_answer(reply)
                elif step == DS:
                    documents = select_documents(reply, item.documents)
                    if not documents:
                        yield Fault("Invalid Selection")
                    item.documents = documents or item.documents
                else:
                    texts = sub_questions(reply)
                    if not 0 < len(texts) <= MAX_PARTS:
                        yield Fault("Too Many Sub-Questions" if texts else "No Sub-Question")
                    # Later sub-questions of a series start with the substitution of answers.
                    later = (FILL, PLAN) if step == QDS else (PLAN,)
                    parts = parts_of(reply, item.text)
                    items += [Item(part, later if n else (PLAN,)) for n, part in enumerate(parts)]
            # 4. Items that no planner call is left for have no steps, the last items first.
            planned = [item for item in items if PLAN in item.todo]
            for item in planned[max(self.max_turns - turns, 0) :]:
                item.todo = ()
        answer = items[0].answer
        if answer is None:
            yield Done(None, "No Sub-Answer" if strategy else "No Legal Workflow")
        is_complete = all(item.answer is not None for item in items)
        yield Done(answer, "answered" if is_complete else "answered, Out Of Turns")

    def _effect(self, item: Item, items: Sequence[Item], strategy: str, turns: int) -> Effect:
        """Returns the effect of the next step of an item."""
        step = item.todo[0]
        if step == R:
            return Search(item.query or item.text, self.top_k, turn=item.turn)
        # The grammar of later planner calls has no decomposition.
        planner = workflows.SUB_PLANNER if strategy else PLANNER
        executor = PURPOSES.get(step, "") if step != AG or item.documents else "answer_direct"
        name = planner if step == PLAN else executor
        # Answered sub-questions are shown as numbered pairs, like documents.
        pairs = [Passage("", part.text, part.answer or "") for part in answered(items)]
        answers = format_passages(self.style, pairs, form="pair")
        documents = format_passages(self.style, item.documents)
        values = {"question": item.text, "documents": documents, "answers": answers}
        messages = user_turn(self.style, name, **values)
        if step == PLAN:
            return Generate(name, messages, turns + 1)
        request = LLMRequest(name, messages, Sampling(0.0, 1.0, self.reply_tokens))
        # A substitution serves the decomposition, so the question's planner call pays for it.
        return CallLLM(request, turn=items[0].turn if step == FILL else item.turn)


def active_items(items: Sequence[Item], strategy: str) -> list[Item]:
    """Returns the items whose next step can be performed.

    Sub-questions come before the remaining steps of the question: one after the other, or all at
    once after a parallel decomposition.
    """
    waiting = [item for item in items[1:] if item.todo]
    if waiting:
        return waiting if strategy == QDP else waiting[:1]
    todo = items[0].todo
    # Without an answered sub-question there is nothing to summarize.
    return [items[0]] if todo and (todo[0] != AS or answered(items)) else []


def answered(items: Sequence[Item]) -> list[Item]:
    """Returns the sub-questions with an answer."""
    return [item for item in items[1:] if item.answer is not None]


def steps_of(plan: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the steps of a legal plan: a decomposition ends with the summary."""
    if plan[0] in (QDS, QDP):
        return (*plan, AS)
    # DS before any R has nothing to select from.
    return tuple(step for n, step in enumerate(plan) if step != DS or R in plan[:n])
