"""The world's reader as executors of a workflow: decompose, rewrite, select, summarise, explain.

What MAO-ARAG asks of its frozen executors, and InstructRAG of the writer of its rationales, by rule
and on the text of the prompt alone. A chain of relations comes apart into steps that need each
other's answers, so only the serial decomposition serves it; the two sides of a comparison do not,
so the parallel one does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jax_ragrl.corpus.world import RELATIONS
from jax_ragrl.llm.reader import (
    UNKNOWN,
    Plan,
    WorldReader,
    conclude,
    facts_of,
    question_of,
    resolve,
    understand,
)
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.types import LLMRequest


class WorldExecutors(WorldReader):
    """A `WorldReader` that also serves the purposes in `EXECUTORS`; all others as before.

    Sub-questions with their answers are read in the prompt style's form `pair`.
    """

    def complete(self, requests: Sequence[LLMRequest]) -> list[str]:
        """One reply a request, in order."""
        return [self._serve(r) for r in requests]

    def _serve(self, request: LLMRequest) -> str:
        executor = EXECUTORS.get(request.purpose)
        if executor is None:
            return super().complete([request])[0]
        return executor(self._style, request.messages[-1].content)


def decompose_serial(style: str, prompt: str) -> str:
    """One sub-question a hop; `#i` stands for the answer of sub-question i."""
    del style
    question = question_of(prompt)
    plan = understand(question)
    hops = plan.hops if plan else ()
    return _lines([_ask(r, e or f"#{i}") for i, (r, e) in enumerate(hops)] or [question])


def decompose_parallel(style: str, prompt: str) -> str:
    """One sub-question a hop that needs no other's answer: of a chain, each holds the one before.

    So a comparison falls into its two sides, while the last part of a chain is the whole question.
    """
    del style
    question = question_of(prompt)
    plan = understand(question)
    parts, subject = [], ""
    for relation, entity in plan.hops if plan else ():
        subject = entity or subject
        parts.append(_ask(relation, subject))
        subject = f"the {RELATIONS[relation].noun} of {subject}"
    return _lines(parts or [question])


def rewrite(style: str, prompt: str) -> str:
    """The question as a search query."""
    del style
    question = question_of(prompt)
    plan = understand(question)
    return query_of(plan) if plan else question


def substitute(style: str, prompt: str) -> str:
    """The sub-question with the answers of earlier ones in the place of their numbers."""
    question = question_of(prompt)
    for i, (_, answer) in enumerate(read_numbered(style, prompt, form="pair"), start=1):
        question = question.replace(f"#{i}", answer)
    return question


def select(style: str, prompt: str) -> str:
    """The numbers of the documents that tell a fact on the way to the answer, or `none`."""
    plan = understand(question_of(prompt))
    told = [facts_of(text) for _, text in read_numbered(style, prompt)]
    pairs = [pair for pair, _ in resolve(plan, told)] if plan else []
    useful = [i for i, facts in enumerate(told, start=1) if any(p in facts for p in pairs)]
    return ", ".join(map(str, useful)) or "none"


def summarise(style: str, prompt: str) -> str:
    """A chain's answer is its last; a comparison is made from the facts that were answered."""
    pairs = read_numbered(style, prompt, form="pair")
    plan = understand(question_of(prompt))
    if plan is None or not plan.compare:
        return pairs[-1][1] if pairs else UNKNOWN
    found = {question: answer for question, answer in pairs if answer != UNKNOWN}
    known = {_hop(question): answer for question, answer in found.items()}
    return conclude(plan, [known.get(hop) for hop in plan.hops])


def explain(style: str, prompt: str) -> str:
    """The facts on the way to the answer in order, and what a comparison of them yields.

    Unless the documents tell all of them, nothing is explained.
    """
    plan = understand(question_of(prompt))
    told = [facts_of(text) for _, text in read_numbered(style, prompt)]
    steps = resolve(plan, told) if plan else []
    values = [value for _, value in steps if value]
    if plan is None or len(values) < len(plan.hops):
        return UNKNOWN
    facts = [f"The {relation} of {name} is {value}." for (name, relation), value in steps]
    verdict = [f"So it is {conclude(plan, values)}."] if plan.compare else []
    return " ".join(facts + verdict)


EXECUTORS: Mapping[str, Callable[[str, str], str]] = {
    "decompose_serial": decompose_serial,
    "decompose_parallel": decompose_parallel,
    "rewrite": rewrite,
    "substitute": substitute,
    "select": select,
    "summarise": summarise,
    "explain": explain,
}


def query_of(plan: Plan) -> str:
    """A search query for a whole question: its noun phrase."""
    if plan.compare:
        return f"{plan.compare} of {' and '.join(e for _, e in plan.hops if e)}"
    relations = [r for r, _ in plan.hops]
    return " of ".join([*reversed(relations), plan.hops[0][1] or ""])


def _ask(relation: str, subject: str) -> str:
    return RELATIONS[relation].asks[0].format(subject)


def _hop(question: str) -> tuple[str, str | None] | None:
    """The hop of a question that has only one."""
    plan = understand(question)
    return plan.hops[0] if plan and len(plan.hops) == 1 else None


def _lines(parts: Sequence[str]) -> str:
    return "\n".join(f"{i}. {part}" for i, part in enumerate(parts, start=1))
