"""Teachers of MMOA-RAG's three roles: the paper's heuristic labels, and a script for the world.

The labels (Chen et al. 2025, appendix B) need no teacher model: rewritings come from a public set,
a document is worth selecting if it holds a word of the question or of its answer, and the generator
is shown what would be selected.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

from jax_ragrl.config.schema import one_of
from jax_ragrl.llm.reader import UNKNOWN, Plan, conclude, facts_of, question_of, resolve, understand
from jax_ragrl.retrieval.base import Retriever, search_all
from jax_ragrl.rollout.effects import Generate, Segment
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.systems.mmoa_rag import (
    DOCUMENT,
    GENERATOR,
    MMOARAG,
    REWRITER,
    SELECTOR,
    State,
    render_answer,
    render_queries,
    render_selection,
)
from jax_ragrl.text.metrics import CLOSED, normalise
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.types import Message, Passage, Question
from jax_ragrl.warmstart.demos import Demo

# Words that say nothing about what a text is about.
STOP_WORDS = frozenset(
    "about above after again against all also am an and any are as at be because been before being "
    "below between both but by can could did do does doing down during each few for from further "
    "had has have having he her here hers herself him himself his how if in into is it its itself "
    "just me more most my myself no nor not now of off on once only or other our ours ourselves "
    "out over own same she should so some such than that the their theirs them themselves then "
    "there these they this those through to too under until up us very was we were what when where "
    "which while who whom whose why will with would yes you your yours yourself".split()
)


# --- Heuristic labels -----------------------------------------------------------------------------


def content_words(text: str) -> list[str]:
    """The words of a text longer than one character that are not in `STOP_WORDS`."""
    return [w for w in normalise(text, "space").split() if len(w) > 1 and w not in STOP_WORDS]


def words_of_both(question: Question) -> list[str]:
    """What a useful document may hold: words of the question and of its answer (paper)."""
    return content_words(f"{question.text} {question.answers[0]}")


def words_of_answer(question: Question) -> list[str]:
    """The same from the answer alone, or from the question where that says yes or no (code)."""
    closed = normalise(question.answers[0]) in CLOSED
    return content_words(question.text if closed else question.answers[0])


LABELS = {"both": words_of_both, "answer": words_of_answer}


def useful(words: Sequence[str], passages: Sequence[Passage]) -> tuple[int, ...]:
    """The numbers, from 0, of passages in which some word occurs, be it inside another word."""
    texts = [" ".join(content_words(f"{p.title} {p.text}")) for p in passages]
    return tuple(i for i, text in enumerate(texts) if any(word in text for word in words))


def heuristic_demos(
    system: MMOARAG,
    questions: Sequence[Question],
    retriever: Retriever,
    rng: random.Random,
    *,
    rewritings: Mapping[str, str] | None = None,
    label: str = "both",
) -> list[Demo]:
    """Demonstrations of every role that is on; questions without an answer give none.

    Args:
      system: whose prompts are written, and whose `top_k` passages are labelled in random order.
      rewritings: question id to its searches, separated by `;`; the rewriter learns from no other.
      label: `both` (paper) or `answer` (code), see `LABELS`.
    """
    one_of("label", label, LABELS)
    asked = [q for q in questions if q.answers]
    found = search_all(retriever, [q.text for q in asked], system.top_k)
    demos = []
    for question, hits in zip(asked, found, strict=True):
        passages = tuple(shuffled(rng, hits.passages))
        chosen = useful(LABELS[label](question), passages)
        rewriting = (rewritings or {}).get(question.id, "")
        for role, state, text in _labelled(system, question, passages, chosen, rewriting):
            if role in system.roles:
                effect = system.wants(state)
                assert isinstance(effect, Generate), "a role that is on is what its phase waits for"
                demos.append(Demo(question.id, role, effect.messages, text))
    return demos


def _labelled(
    system: MMOARAG,
    question: Question,
    passages: tuple[Passage, ...],
    chosen: tuple[int, ...],
    rewriting: str,
) -> Iterator[tuple[str, State, str]]:
    """What each role sees of a question, and what it should write."""
    queries = tuple(query.strip() for query in rewriting.split(";") if query.strip())
    if queries:
        yield REWRITER, State(question, "rewrite"), render_queries(queries)
    selecting = State(question, "select", candidates=passages)
    yield SELECTOR, selecting, render_selection(chosen, system.word)
    generating = State(question, "generate", documents=tuple(passages[i] for i in chosen))
    yield GENERATOR, generating, render_answer(question.answers[0])


# --- A script for the generated encyclopedia ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Plays the three roles by the rules of the world, as well as searching once allows.

    A chain is searched as far as its links are `known`, which maps (entity, relation) to what it
    knows by heart. `lazy` is the chance that the rewriter copies the question; `greedy` that the
    selector also keeps every passage that shares a name with the question, `hasty` that it keeps
    the first alone.
    """

    style: str = "mmoa_rag_tiny"
    word: str = DOCUMENT
    lazy: float = 0.0
    greedy: float = 0.0
    hasty: float = 0.0
    known: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    def write(
        self,
        role: str,
        messages: Sequence[Message],
        after: Sequence[Segment],
        rng: random.Random,
    ) -> str:
        """The text of one action."""
        del after
        prompt = messages[-1].content
        question = question_of(prompt)
        plan = understand(question)
        documents = read_numbered(self.style, prompt)
        if role == REWRITER:
            return self._rewrite(question, plan, rng)
        if role == SELECTOR:
            return self._select(plan, documents, rng) if plan else ""
        return render_answer(self._answer(plan, documents) if plan else UNKNOWN)

    def _rewrite(self, question: str, plan: Plan | None, rng: random.Random) -> str:
        if plan is None or rng.random() < self.lazy:
            return question
        steps = resolve(plan, [self.known])
        return render_queries(tuple(f"{relation} of {entity}" for (entity, relation), _ in steps))

    def _answer(self, plan: Plan, documents: Sequence[tuple[str, str]]) -> str:
        told = [facts_of(text) for _, text in documents]
        values = [value or None for _, value in resolve(plan, [self.known, *told])]
        missing = len(plan.hops) - len(values)
        return conclude(plan, [*values, *[None] * missing])

    def _select(self, plan: Plan, documents: Sequence[tuple[str, str]], rng: random.Random) -> str:
        if rng.random() < self.hasty:
            return render_selection((0,), self.word)
        told = [facts_of(text) for _, text in documents]
        pairs = [pair for pair, _ in resolve(plan, [self.known, *told])]
        names = {word for _, entity in plan.hops for word in (entity or "").split()}
        greedy = rng.random() < self.greedy
        chosen = tuple(
            i
            for i, (title, _) in enumerate(documents)
            if any(pair in told[i] for pair in pairs) or (greedy and names & set(title.split()))
        )
        return render_selection(chosen, self.word)
