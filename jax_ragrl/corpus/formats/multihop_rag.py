"""MultiHop-RAG: questions over news, and its corpus of articles.

Tang and Yang 2024: questions `{query, answer, question_type, evidence_list [{title, ...}]}`;
articles `{title, body, ...}`. Null queries have no evidence and so no gold.
"""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import Record, field, others, parts, read_records, unique
from jax_ragrl.types import Passage, Question


def _question(record: Record, number: int) -> Question:
    gold = unique(field(part, "title", str) for part in parts(record, "evidence_list"))
    return Question(
        id=f"multihop_rag{number}",
        text=field(record, "query", str),
        answers=(field(record, "answer", str),),
        gold=gold,
        hops=len(gold),
        kind=str(record.fields.get("question_type", "")),
        metadata=others(record, "query", "answer", "question_type"),
    )


def read_multihop_rag(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Questions with the titles of the quoted articles as gold, named by position."""
    return [_question(record, n) for n, record in enumerate(read_records(path))], []


def read_multihop_rag_corpus(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Whole articles, named by position."""
    passages = []
    for n, record in enumerate(read_records(path)):
        passages.append(Passage(f"p{n}", field(record, "title", str), field(record, "body", str)))
    return [], passages
