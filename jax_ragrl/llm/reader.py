"""A rule-based reader of the generated encyclopedia that plays the frozen language model.

It has the weaknesses that make retrieval worth learning: it knows only the famous facts, it reads
at most `limit` documents, and each irrelevant document may distract it, most of all one that states
the same relation of an entity with a similar name. Like any other model it sees nothing but the
text of the prompt. Equal prompts get equal replies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

from jax_ragrl.corpus.world import CLUSTERS, COMPARISONS, RELATIONS, World
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import LLMRequest, Passage

UNKNOWN = "I do not know."
_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)


def _pattern(form: str) -> re.Pattern[str]:
    """Returns the regular expression that parses a template; `{x}` becomes the group `_x`."""
    # Names of groups must not begin with a digit, hence the underscore: `{0}` becomes `_0`.
    parts = re.split(r"\{(\w*)\}", form)
    text = "".join(
        re.escape(part) if i % 2 == 0 else f"(?P<_{part or f'x{i}'}>.+?)"
        for i, part in enumerate(parts)
    )
    return re.compile(f"^{text}$")


_STATEMENTS = tuple(
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
    """A parsed question.

    Fields:
      hops: (relation, entity) per hop; entity None is the answer of the hop before.
      compare: the relation by which a comparison is decided; empty for a chain.
    """

    hops: tuple[tuple[str, str | None], ...]
    compare: str = ""

    def steps(self) -> list[str]:
        """Returns one line per hop; `#i` is a placeholder for the answer of hop i."""
        return [f"{r} of {e or f'#{i}'}" for i, (r, e) in enumerate(self.hops)]


def understand(question: str) -> Plan | None:
    """Parses a question of the encyclopedia; None for any other text."""
    for relation, pattern in _COMPARES:
        if match := pattern.match(question):
            return Plan(tuple((relation, entity) for entity in match.groups()), relation)
    for relation, pattern in _ASKS:
        if match := pattern.match(question):
            relations, entity = unnest(match[1])
            if all(r in RELATIONS for r in relations):
                # The innermost relation is resolved first; the one of the question itself comes
                # last.
                hops = [*relations, relation]
                return Plan(tuple((r, None if i else entity) for i, r in enumerate(hops)))
    return None


def question_of(prompt: str) -> str:
    """Returns the last question line of a prompt; empty if there is none."""
    questions = _QUESTION.findall(prompt)
    # Earlier question lines belong to examples in the prompt.
    return questions[-1] if questions else ""


def unnest(phrase: str) -> tuple[list[str], str]:
    """Parses `the a of the b of X` as (["b", "a"], "X"): the innermost relation comes first."""
    relations: list[str] = []
    while match := _OF.match(phrase):
        relations.insert(0, match["noun"])
        phrase = match["rest"]
    return relations, phrase


def facts_of(text: str) -> dict[tuple[str, str], str]:
    """Parses the facts (entity, relation) -> value of a passage of the encyclopedia."""
    for relations, pattern in _STATEMENTS:
        if match := pattern.match(text):
            subject = match["_s"]
            return {(subject, r): match[f"_{i}"] for i, r in enumerate(relations)}
    return {}


def resolve(
    plan: Plan, fact_sets: Sequence[Mapping[tuple[str, str], str]]
) -> list[tuple[tuple[str, str], str]]:
    """Resolves the hops of a plan as ((entity, relation), value), until an entity is unknown."""
    values = {pair: value for facts in fact_sets for pair, value in facts.items()}
    # The value of a hop is the entity of the next one, unless the plan names an entity.
    steps, value = [], ""
    for relation, entity in plan.hops:
        subject = entity or value
        if not subject:
            break
        value = values.get((subject, relation), "")
        steps.append(((subject, relation), value))
    return steps


class WorldReader:
    """Answers questions of the encyclopedia by rule; knows the famous facts of its `world`.

    Args:
      limit: number of documents that the reader reads; it ignores the rest of the prompt.
      noise: probability that an irrelevant document distracts the reader.
      confusion: the same for a document that states the relation in question of an entity with a
        similar name.
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
        self._famous = {pair: world.facts[pair[0]][pair[1]] for pair in world.famous}
        self._limit, self._noise, self._confusion = limit, noise, confusion

    def complete(self, requests: Sequence[LLMRequest]) -> list[str]:
        """Returns one reply per request: a roadmap for the purpose `roadmap`, else an answer."""
        return [self._reply(r.purpose, r.messages[-1].content) for r in requests]

    def _reply(self, purpose: str, prompt: str) -> str:
        question = question_of(prompt)
        plan = understand(question)
        if purpose == "roadmap":
            steps = plan.steps() if plan else [question]
            return "\n".join(f"{i}. {step}" for i, step in enumerate(steps, start=1))
        if plan is None:
            return UNKNOWN
        documents = [Passage("", t, text) for t, text in parse_passages(self._style, prompt)]
        return self._answer(question, plan, documents[: self._limit])

    def _answer(self, question: str, plan: Plan, documents: Sequence[Passage]) -> str:
        document_facts = [facts_of(d.text) for d in documents]
        steps = resolve(plan, [self._famous, *document_facts])
        pairs, values = [pair for pair, _ in steps], [value or None for _, value in steps]
        read = {pair: value for facts in document_facts for pair, value in facts.items()}
        similar = [v for pair, v in read.items() if any(_confusable(pair, p) for p in pairs)]
        irrelevant = sum(not any(pair in facts for pair in pairs) for facts in document_facts)
        if self._is_distracted(question, documents, irrelevant, len(similar)):
            # A distracted reader fails in the last hop: with a confusable value, or without any.
            values = [*values[:-1], similar[0] if similar else None]
        return conclude(plan, values)

    def _is_distracted(
        self, question: str, documents: Sequence[Passage], irrelevant: int, similar: int
    ) -> bool:
        """Draws whether any document distracts the reader."""
        unrelated = irrelevant - min(similar, irrelevant)
        # Each document distracts independently of the others.
        undistracted = (1 - self._noise) ** unrelated * (1 - self._confusion) ** similar
        # The draw is a hash of the prompt, so that equal prompts get equal replies.
        digest = hashlib.sha256("\n".join([question, *(d.text for d in documents)]).encode())
        # 48 bits, because a float represents them exactly.
        return int.from_bytes(digest.digest()[:6], "big") / 2**48 >= undistracted


def _confusable(fact: tuple[str, str], target: tuple[str, str]) -> bool:
    """Whether a fact has the relation of another one and an entity that shares a name part."""
    common_words = set(fact[0].split()) & set(target[0].split())
    return fact[1] == target[1] and fact[0] != target[0] and bool(common_words)


def conclude(plan: Plan, values: Sequence[str | None]) -> str:
    """Answers a question from the value of each hop; guesses if a compared fact is missing."""
    if not plan.compare:
        return values[-1] or UNKNOWN
    (a, b), first = values, plan.hops[0][1] or UNKNOWN
    if plan.compare == "year":
        # Without both years the guess is the film that the question names first.
        later = a is not None and b is not None and b < a
        return plan.hops[1][1] or UNKNOWN if later else first
    return "yes" if a is not None and a == b else "no"
