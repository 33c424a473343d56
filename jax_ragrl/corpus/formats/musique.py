"""MuSiQue records, one per line.

Trivedi et al. 2022: `id, question, answer, answer_aliases, paragraphs [{idx, title,
paragraph_text, is_supporting}], question_decomposition [{question, answer,
paragraph_support_idx}]`, where `#1` in a sub-question stands for the first answer.
"""

from __future__ import annotations

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    others,
    parts,
    question_text,
    read_records,
    text,
    unique,
)
from jax_ragrl.corpus.formats.hotpotqa import passages_by_title
from jax_ragrl.types import Passage, Question

USED_FIELDS = ("id", "question", "answer", "answer_aliases", "paragraphs")


def _gold(record: Record) -> tuple[str, ...]:
    """Returns the titles of supporting paragraphs, in the order of the hops."""
    hop_of = {
        step.fields.get("paragraph_support_idx"): hop
        for hop, step in enumerate(parts(record, "question_decomposition"))
    }
    paragraphs = [p for p in parts(record, "paragraphs") if p.fields.get("is_supporting")]
    # Stable: paragraphs that no step names keep their order, after the others.
    paragraphs.sort(key=lambda p: hop_of.get(p.fields.get("idx"), len(hop_of)))
    return unique(text(paragraph, "title") for paragraph in paragraphs)


def _question(record: Record) -> Question:
    key = text(record, "id")
    decomposition = list(parts(record, "question_decomposition"))
    steps = tuple(text(step, "question") for step in decomposition)
    return Question(
        id=key,
        text=question_text(record, "question"),
        answers=answers(record, "answer", "answer_aliases"),
        gold=_gold(record),
        steps=steps,
        hops=len(steps),
        # Ids begin with the structure of the question, such as `2hop__` or `3hop1__`.
        kind=key.partition("__")[0],
        # The decomposition stays in the metadata, because its intermediate answers have no other
        # field.
        metadata=others(record, *USED_FIELDS)
        | {"question_decomposition": [dict(p.fields) for p in decomposition]},
    )


def read_musique(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions with sub-questions and gold titles, and paragraphs as passages."""
    records = list(read_records(path))
    paragraphs = (paragraph for record in records for paragraph in parts(record, "paragraphs"))
    contexts = ((text(p, "title"), text(p, "paragraph_text")) for p in paragraphs)
    return [_question(record) for record in records], passages_by_title(contexts)
