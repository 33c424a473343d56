"""HotpotQA distractor records, and 2WikiMultiHopQA's, which extend them.

Yang et al. 2018, Ho et al. 2020: `_id, question, answer, supporting_facts [[title, sentence]],
context [[title, [sentence, ...]]]`, and in 2Wiki `evidences [[subject, relation, object]]`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import (
    Record,
    field,
    joined,
    others,
    read_records,
    unique,
)
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

USED = ("_id", "id", "question", "answer", "context", "type")


def _pairs(record: Record, name: str) -> Iterator[tuple[str, object]]:
    """The [title, value] pairs of a field."""
    for n, pair in enumerate(field(record, name, list), start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UserError(f"{record.place}: {name} {n} is not a pair [title, ...]: rewrite it")
        yield pair[0], pair[1]


def _question(record: Record) -> Question:
    key = "_id" if "_id" in record.fields else "id"
    gold = unique(title for title, _ in _pairs(record, "supporting_facts"))
    return Question(
        id=str(field(record, key, object)),
        text=field(record, "question", str),
        answers=(field(record, "answer", str),),
        gold=gold,
        hops=len(gold),  # each hop of these sets is a fact of another article
        kind=str(record.fields.get("type", "")),
        metadata=others(record, *USED),
    )


def _contexts(record: Record) -> Iterator[tuple[str, str]]:
    for title, sentences in _pairs(record, "context"):
        if not isinstance(sentences, list):
            raise UserError(f"{record.place}: the context {title!r} is not a list of sentences")
        yield title, joined(sentences)


def named(contexts: Iterator[tuple[str, str]]) -> list[Passage]:
    """Distinct (title, text) pairs as passages named by title, `title#2` for a second text."""
    seen: dict[str, dict[str, None]] = {}
    for title, text in contexts:
        seen.setdefault(title, {})[text] = None
    return [
        Passage(title if n == 1 else f"{title}#{n}", title, text)
        for title, texts in seen.items()
        for n, text in enumerate(texts, start=1)
    ]


def read_hotpotqa(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Questions with gold titles, and every distinct context paragraph as a passage."""
    records = list(read_records(path))
    contexts = (context for record in records for context in _contexts(record))
    return [_question(record) for record in records], named(contexts)
