"""MultiHop-RAG: questions over news, and its corpus of articles.

Tang and Yang 2024: questions `{query, answer, question_type, evidence_list [{title, ...}]}`;
articles `{title, body, ...}`. Null queries have no evidence, and therefore no gold.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import Record, field, others, parts, read_records, unique
from jax_ragrl.corpus.formats.look import look
from jax_ragrl.corpus.formats.own import own_fields, read_own_passages
from jax_ragrl.types import Passage, Question


def _question(record: Record, number: int) -> Question:
    gold = unique(field(part, "title", str) for part in parts(record, "evidence_list"))
    return Question(
        id=f"multihop_rag{number}",
        text=field(record, "query", str),
        answers=(field(record, "answer", str),),
        gold=gold,
        # One article per hop.
        hops=len(gold),
        kind=str(record.fields.get("question_type", "")),
        metadata=others(record, "query", "answer", "question_type"),
    )


def read_multihop_rag(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads questions; titles of the quoted articles are gold, the id is the position."""
    return [_question(record, n) for n, record in enumerate(read_records(path))], []


def read_multihop_rag_corpus(
    path: pathlib.Path | str,
) -> tuple[list[Question], Iterator[Passage]]:
    """Reads whole articles as passages; without ids, the id is the position."""
    return [], read_own_passages(path, own_fields("passages", look(path).fields))
