"""Teachers of MMOA-RAG's three roles: the paper's heuristic labels, and a script.

The labels (Chen et al. 2025, appendix B) need no teacher model: rewritings come from a public data
set, a document is selected if it contains a word of the question or of its answer, and the
generator gets the selected documents.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

from jax_ragrl.config.schema import one_of
from jax_ragrl.llm.reader import UNKNOWN, Plan, conclude, facts_of, question_of, resolve, understand
from jax_ragrl.retrieval.base import Retriever, search_all
from jax_ragrl.rollout.effects import Generate, Search, Segment
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.rollout.system import Execution
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.systems.mmoa_rag import (
    DOCUMENT,
    GENERATOR,
    MMOARAG,
    REWRITER,
    SELECTOR,
    render_answer,
    render_queries,
    render_selection,
)
from jax_ragrl.text.metrics import CLOSED, normalize
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import Hits, Message, Passage, Question
from jax_ragrl.warmstart.demos import Demo

# Words without information about the topic of a text.
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
    """Returns the words of a text that are longer than one character and not in `STOP_WORDS`."""
    return [w for w in normalize(text, "space").split() if len(w) > 1 and w not in STOP_WORDS]


def words_of_both(question: Question) -> list[str]:
    """Returns the words of the question and of its answer, which select documents (paper)."""
    return content_words(f"{question.text} {question.answers[0]}")


def words_of_answer(question: Question) -> list[str]:
    """Returns the words of the answer, or of the question if the answer is yes or no (code)."""
    is_closed = normalize(question.answers[0]) in CLOSED
    return content_words(question.text if is_closed else question.answers[0])


LABELS = {"both": words_of_both, "answer": words_of_answer}


def useful(words: Sequence[str], passages: Sequence[Passage]) -> tuple[int, ...]:
    """Returns the numbers, from 0, of passages that contain one of the words as a substring."""
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
    """Returns demonstrations of every role that the system has; `rng` shuffles passages.

    Questions without an answer are skipped. `rewritings` are, by question id, queries separated by
    `;`: other questions give no demonstration of the rewriter. `label` is a key of `LABELS`.
    """
    one_of("label", label, LABELS)
    usable = [q for q in questions if q.answers]
    results = search_all(retriever, [q.text for q in usable], system.top_k)
    demos = []
    for question, hits in zip(usable, results, strict=True):
        passages = tuple(shuffled(rng, hits.passages))
        selection = useful(LABELS[label](question), passages)
        rewriting = (rewritings or {}).get(question.id, "")
        queries = tuple(q for part in rewriting.split(";") if (q := part.strip()))
        labels = {
            REWRITER: render_queries(queries),
            SELECTOR: render_selection(selection, system.document_word),
            GENERATOR: render_answer(question.answers[0]),
        }
        chosen = tuple(passages[i] for i in selection)
        shown = Hits(passages if SELECTOR in system.roles else chosen, ())
        execution = Execution(system, question)
        while isinstance(effect := execution.effects[0], Generate | Search):
            if isinstance(effect, Search):
                execution = execution.advance(shown)
                continue
            text = labels[effect.role]
            if text or effect.role != REWRITER:
                demos.append(Demo(question.id, effect.role, effect.messages, text))
            # Without queries there is one search, for the question.
            no_queries = ParsedAction("Rewrite")
            action = system.roles[effect.role].parse(text)
            execution = execution.advance(no_queries if effect.role == REWRITER else action)
    return demos


# --- A script for the synthetic corpus ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Plays the three roles by the rules of the synthetic corpus, and its errors.

    Fields:
      style: prompt style.
      document_word: prefix of document numbers in selections.
      p_copy_question: probability that the rewriter copies the question.
      p_keep_related: probability that the selector includes every passage that shares a name with
        the question.
      p_keep_first: probability that the selector selects only the first passage.
      known: from (entity, relation) to value: facts known by heart, with which the rewriter can
        follow a chain beyond its first link.
    """

    style: str = "mmoa_rag_tiny"
    document_word: str = DOCUMENT
    p_copy_question: float = 0.0
    p_keep_related: float = 0.0
    p_keep_first: float = 0.0
    known: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    def write(
        self, role: str, messages: Sequence[Message], history: Sequence[Segment], rng: random.Random
    ) -> str:
        """Writes one action, see `TeacherScript`."""
        del history
        prompt = messages[-1].content
        question = question_of(prompt)
        plan = understand(question)
        documents = parse_passages(self.style, prompt)
        if role == REWRITER:
            if plan is None or rng.random() < self.p_copy_question:
                return question
            steps = resolve(plan, [self.known])
            return render_queries(tuple(f"{relation} of {name}" for (name, relation), _ in steps))
        if role == SELECTOR:
            return self._select(plan, documents, rng) if plan else ""
        if plan is None:
            return render_answer(UNKNOWN)
        facts = [facts_of(text) for _, text in documents]
        values = [value or None for _, value in resolve(plan, [self.known, *facts])]
        missing = len(plan.hops) - len(values)
        return render_answer(conclude(plan, [*values, *[None] * missing]))

    def _select(self, plan: Plan, documents: Sequence[tuple[str, str]], rng: random.Random) -> str:
        if rng.random() < self.p_keep_first:
            return render_selection((0,), self.document_word)
        facts = [facts_of(text) for _, text in documents]
        pairs = [pair for pair, _ in resolve(plan, [self.known, *facts])]
        names = {word for _, entity in plan.hops for word in (entity or "").split()}
        greedy = rng.random() < self.p_keep_related
        selection = tuple(
            i
            for i, (title, _) in enumerate(documents)
            if any(pair in facts[i] for pair in pairs) or (greedy and names & set(title.split()))
        )
        return render_selection(selection, self.document_word)
