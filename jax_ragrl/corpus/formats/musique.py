"""MuSiQue records, one per line.

Trivedi et al. 2022: `id, question, answer, answer_aliases, paragraphs [{idx, title,
paragraph_text, is_supporting}], question_decomposition [{question, answer,
paragraph_support_idx}]`, where `#1` in a sub-question stands for the first answer.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import (
    Record,
    field,
    others,
    parts,
    read_records,
    strings,
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
    return unique(field(paragraph, "title", str) for paragraph in paragraphs)


def _question(record: Record) -> Question:
    key = field(record, "id", str)
    aliases = strings(record, "answer_aliases") if "answer_aliases" in record.fields else ()
    steps = tuple(field(step, "question", str) for step in parts(record, "question_decomposition"))
    return Question(
        id=key,
        text=field(record, "question", str),
        answers=unique((field(record, "answer", str), *aliases)),
        gold=_gold(record),
        steps=steps,
        hops=len(steps),
        # Ids begin with the structure of the question, such as `2hop__` or `3hop1__`.
        kind=key.partition("__")[0],
        # The decomposition stays in the metadata, because its intermediate answers have no other
        # field.
        metadata=others(record, *USED_FIELDS),
    )


def _contexts(record: Record) -> Iterator[tuple[str, str]]:
    for paragraph in parts(record, "paragraphs"):
        yield field(paragraph, "title", str), field(paragraph, "paragraph_text", str)


def read_musique(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads questions with sub-questions and gold titles, and paragraphs as passages."""
    records = list(read_records(path))
    contexts = (context for record in records for context in _contexts(record))
    return [_question(record) for record in records], passages_by_title(contexts)
