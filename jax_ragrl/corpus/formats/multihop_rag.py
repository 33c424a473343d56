"""MultiHop-RAG: questions over news, and its corpus of articles.

Tang and Yang 2024: questions `{query, answer, question_type, evidence_list [{title, ...}]}`;
articles `{title, body, ...}`. Null queries have no evidence, and therefore no gold.
"""

from __future__ import annotations

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    optional_text,
    others,
    parts,
    question_text,
    read_records,
    text,
    unique,
)
from jax_ragrl.types import Passage, Question


def _question(record: Record, number: int) -> Question:
    gold = unique(text(part, "title") for part in parts(record, "evidence_list"))
    return Question(
        id=f"multihop_rag{number}",
        text=question_text(record, "query"),
        answers=answers(record, "answer"),
        gold=gold,
        # One article per hop.
        hops=len(gold),
        kind=optional_text(record, "question_type"),
        metadata=others(record, "query", "answer", "question_type"),
    )


def read_multihop_rag(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; titles of the quoted articles are gold, the id is the position."""
    return [_question(record, n) for n, record in enumerate(read_records(path))], []
