"""A rule-based reader of the generated encyclopedia, standing in for a frozen language model.

It has the weaknesses that make retrieval worth learning: it knows only the famous facts, it reads
at most `limit` documents, and every document that does not bear on the question may distract it,
those that tell the same relation of a similarly named entity most of all. It works on the text of
the prompt alone, like any other model, and the same prompt always gets the same reply.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

from jax_ragrl.corpus.world import CLUSTERS, COMPARISONS, RELATIONS, World
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.types import LLMRequest, Passage

UNKNOWN = "I do not know."
_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)


def _pattern(form: str) -> re.Pattern[str]:
    """The regular expression that reads what `form` writes; `{x}` becomes group `_x`."""
    parts = re.split(r"\{(\w*)\}", form)
    text = "".join(
        re.escape(part) if i % 2 == 0 else f"(?P<_{part or f'x{i}'}>.+?)"
        for i, part in enumerate(parts)
    )
    return re.compile(f"^{text}$")


_TELLINGS = tuple(
    (relations, _pattern(form))
    for clusters in CLUSTERS.values()
    for relations, forms in clusters
    for form in forms
)
_ASKS = tuple((r, _pattern(form)) for r, spec in RELATIONS.items() for form in spec.asks)
_COMPARES = tuple((r, _pattern(form)) for r, (_, form) in COMPARISONS.items())
_OF = re.compile(r"^the (?P<noun>\w+) of (?P<rest>.+)$")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A question understood: each hop is a relation of an entity, or of the hop before (None)."""

    hops: tuple[tuple[str, str | None], ...]
    compare: str = ""  # the relation that is compared, if any

    def steps(self) -> list[str]:
        """One line a hop, `#i` standing for the answer of hop i."""
        return [f"{r} of {e or f'#{i}'}" for i, (r, e) in enumerate(self.hops)]


def understand(question: str) -> Plan | None:
    """The plan of a question of the encyclopedia; None for any other text."""
    for relation, pattern in _COMPARES:
        if found := pattern.match(question):
            return Plan(tuple((relation, entity) for entity in found.groups()), relation)
    for relation, pattern in _ASKS:
        if found := pattern.match(question):
            relations, entity = unnest(found[1])
            if all(r in RELATIONS for r in relations):
                hops = [*relations, relation]
                return Plan(tuple((r, None if i else entity) for i, r in enumerate(hops)))
    return None


def question_of(prompt: str) -> str:
    """The last line of a prompt that asks a question; empty where none does."""
    asked = _QUESTION.findall(prompt)
    return asked[-1] if asked else ""


def unnest(phrase: str) -> tuple[list[str], str]:
    """`the a of the b of X` as (["b", "a"], "X"): the innermost relation comes first."""
    relations: list[str] = []
    while found := _OF.match(phrase):
        relations.insert(0, found["noun"])
        phrase = found["rest"]
    return relations, phrase


def facts_of(text: str) -> dict[tuple[str, str], str]:
    """The facts that a passage of the encyclopedia tells."""
    for relations, pattern in _TELLINGS:
        if found := pattern.match(text):
            subject = found["_s"]
            return {(subject, r): found[f"_{i}"] for i, r in enumerate(relations)}
    return {}


def resolve(
    plan: Plan, told: Sequence[Mapping[tuple[str, str], str]]
) -> list[tuple[tuple[str, str], str]]:
    """Each hop of a plan as ((entity, relation), value), up to the first unknown entity."""
    read = {pair: value for facts in told for pair, value in facts.items()}
    steps, value = [], ""
    for relation, entity in plan.hops:
        subject = entity or value
        if not subject:
            break
        value = read.get((subject, relation), "")
        steps.append(((subject, relation), value))
    return steps


class WorldReader:
    """The rule-based reader.

    Args:
      world: the encyclopedia whose famous facts it knows.
      style: the prompt style whose documents it can read.
      limit: how many documents it reads; the rest of a prompt is not seen.
      noise: the chance that one irrelevant document distracts it.
      confusion: the same for one that tells the asked relation of a similarly named entity.
    """

    name = "rule-based world reader"

    def __init__(
        self,
        world: World,
        *,
        style: str = "c3po_tiny",
        limit: int = 5,
        noise: float = 0.1,
        confusion: float = 0.35,
    ) -> None:
        self._style = style
        self._known = {pair: world.facts[pair[0]][pair[1]] for pair in world.famous}
        self._limit, self._noise, self._confusion = limit, noise, confusion

    def complete(self, requests: Sequence[LLMRequest]) -> list[str]:
        """One reply a request: a roadmap for the purpose `roadmap`, else an answer."""
        return [self._reply(r.purpose, r.messages[-1].content) for r in requests]

    def _reply(self, purpose: str, prompt: str) -> str:
        question = question_of(prompt)
        plan = understand(question)
        if purpose == "roadmap":
            steps = plan.steps() if plan else [question]
            return "\n".join(f"{i}. {step}" for i, step in enumerate(steps, start=1))
        if plan is None:
            return UNKNOWN
        documents = [Passage("", t, text) for t, text in read_numbered(self._style, prompt)]
        return self._answer(question, plan, documents[: self._limit])

    def _answer(self, question: str, plan: Plan, documents: Sequence[Passage]) -> str:
        told = [facts_of(d.text) for d in documents]
        steps = resolve(plan, [self._known, *told])
        pairs, values = [pair for pair, _ in steps], [value or None for _, value in steps]
        read = {pair: value for facts in told for pair, value in facts.items()}
        wrong = [v for pair, v in read.items() if any(_alike(pair, p) for p in pairs)]
        idle = sum(not any(pair in facts for pair in pairs) for facts in told)
        if self._distracted(question, documents, idle, len(wrong)):
            values = [*values[:-1], wrong[0] if wrong else None]
        return conclude(plan, values)

    def _distracted(
        self, question: str, documents: Sequence[Passage], idle: int, alike: int
    ) -> bool:
        clear = (1 - self._noise) ** (idle - min(alike, idle)) * (1 - self._confusion) ** alike
        digest = hashlib.sha256("\n".join([question, *(d.text for d in documents)]).encode())
        return int.from_bytes(digest.digest()[:6], "big") / 2**48 >= clear


def _alike(told: tuple[str, str], asked: tuple[str, str]) -> bool:
    """Whether a told fact can be mistaken for the asked one: same relation, shared name."""
    shared = set(told[0].split()) & set(asked[0].split())
    return told[1] == asked[1] and told[0] != asked[0] and bool(shared)


def conclude(plan: Plan, values: Sequence[str | None]) -> str:
    """The answer of a question from the value of each hop; who lacks a fact to compare guesses."""
    if not plan.compare:
        return values[-1] or UNKNOWN
    (a, b), first = values, plan.hops[0][1] or UNKNOWN
    if plan.compare == "year":
        later = a is not None and b is not None and b < a
        return plan.hops[1][1] or UNKNOWN if later else first
    return "yes" if a is not None and a == b else "no"
