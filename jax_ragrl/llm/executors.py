"""Rule-based executors for the encyclopedia: decompose, rewrite, select, summarize, explain.

They play MAO-ARAG's frozen executors and InstructRAG's writer of rationales, and read nothing but
the prompt. The steps of a chain of relations need each other's answers, so that only the serial
decomposition solves it; the two sides of a comparison are independent, so that the parallel one
does.
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
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import LLMRequest


class WorldExecutors(WorldReader):
    """A `WorldReader` that also handles the purposes in `EXECUTORS`."""

    def complete(self, requests: Sequence[LLMRequest]) -> list[str]:
        """Returns one reply per request, in order."""
        # Any other purpose, such as the final answer, belongs to the reader.
        return [
            EXECUTORS[r.purpose](self._style, r.messages[-1].content)
            if r.purpose in EXECUTORS
            else super(WorldExecutors, self).complete([r])[0]
            for r in requests
        ]


def decompose_serial(style: str, prompt: str) -> str:
    """Writes one sub-question per hop; `#i` is a placeholder for the answer of sub-question i."""
    del style
    question = question_of(prompt)
    plan = understand(question)
    hops = plan.hops if plan else ()
    return _lines([_ask(r, e or f"#{i}") for i, (r, e) in enumerate(hops)] or [question])


def decompose_parallel(style: str, prompt: str) -> str:
    """Writes one independent sub-question per hop; in a chain each contains the one before.

    A comparison is therefore split into its two sides, but the last part of a chain is the whole
    question again.
    """
    del style
    question = question_of(prompt)
    plan = understand(question)
    # The subject grows into a nested noun phrase: "the mayor of the birthplace of X".
    parts, subject = [], ""
    for relation, entity in plan.hops if plan else ():
        subject = entity or subject
        parts.append(_ask(relation, subject))
        subject = f"the {relation} of {subject}"
    return _lines(parts or [question])


def rewrite(style: str, prompt: str) -> str:
    """Rewrites the question as a search query."""
    del style
    question = question_of(prompt)
    plan = understand(question)
    return query_of(plan) if plan else question


def substitute(style: str, prompt: str) -> str:
    """Replaces the placeholders of a sub-question by the answers of earlier ones."""
    question = question_of(prompt)
    # Placeholders count from 1, as the numbers of sub-questions do.
    for i, (_, answer) in enumerate(parse_passages(style, prompt, form="pair"), start=1):
        question = question.replace(f"#{i}", answer)
    return question


def select(style: str, prompt: str) -> str:
    """Lists the numbers of the documents with a fact that the answer needs, or `none`."""
    plan = understand(question_of(prompt))
    document_facts = [facts_of(text) for _, text in parse_passages(style, prompt)]
    # From the documents alone: a famous fact does not make a document useful.
    pairs = [pair for pair, _ in resolve(plan, document_facts)] if plan else []
    numbered_facts = enumerate(document_facts, start=1)
    useful = [i for i, facts in numbered_facts if any(p in facts for p in pairs)]
    return ", ".join(map(str, useful)) or "none"


def summarise(style: str, prompt: str) -> str:
    """Answers the question from its sub-answers: of a chain the last, else by comparison."""
    pairs = parse_passages(style, prompt, form="pair")
    plan = understand(question_of(prompt))
    if plan is None or not plan.compare:
        return pairs[-1][1] if pairs else UNKNOWN
    # By hop instead of by position: sub-questions may be in any order and any phrasing.
    parsed = ((understand(question), answer) for question, answer in pairs if answer != UNKNOWN)
    answers = {p.hops[0]: answer for p, answer in parsed if p and len(p.hops) == 1}
    return conclude(plan, [answers.get(hop) for hop in plan.hops])


def explain(style: str, prompt: str) -> str:
    """Lists the facts that lead to the answer, and the result of comparing them; or `UNKNOWN`."""
    plan = understand(question_of(prompt))
    document_facts = [facts_of(text) for _, text in parse_passages(style, prompt)]
    steps = resolve(plan, document_facts) if plan else []
    # A rationale with a gap would teach the policy to answer without evidence.
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
    """Returns the noun phrase of a question, as a search query."""
    if plan.compare:
        return f"{plan.compare} of {' and '.join(e for _, e in plan.hops if e)}"
    relations = [r for r, _ in plan.hops]
    return " of ".join([*reversed(relations), plan.hops[0][1] or ""])


def _ask(relation: str, subject: str) -> str:
    # Always the first phrasing: equal hops give equal sub-questions, and thus equal searches.
    return RELATIONS[relation].asks[0].format(subject)


def _lines(parts: Sequence[str]) -> str:
    return "\n".join(f"{i}. {part}" for i, part in enumerate(parts, start=1))
