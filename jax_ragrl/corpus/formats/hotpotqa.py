"""HotpotQA's distractor records, and their extension in 2WikiMultiHopQA.

Yang et al. 2018, Ho et al. 2020: `_id, question, answer, supporting_facts [[title, sentence]],
context [[title, [sentence, ...]]]`, and in 2Wiki `evidences [[subject, relation, object]]`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import (
    Record,
    field,
    join_sentences,
    others,
    read_records,
    unique,
)
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

# Supporting facts and evidences stay in the metadata: a question stores titles without sentences.
USED_FIELDS = ("_id", "id", "question", "answer", "context", "type")


def _pairs(record: Record, name: str) -> Iterator[tuple[str, object]]:
    """Yields the [title, value] pairs of a field."""
    for n, pair in enumerate(field(record, name, list), start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UserError(f"{record.place}: {name} {n} is not a pair [title, ...]: rewrite it")
        yield pair[0], pair[1]


def _question(record: Record) -> Question:
    # The official files have `_id`; some copies have `id`.
    key = "_id" if "_id" in record.fields else "id"
    gold = unique(title for title, _ in _pairs(record, "supporting_facts"))
    return Question(
        id=str(field(record, key, object)),
        text=field(record, "question", str),
        answers=(field(record, "answer", str),),
        gold=gold,
        hops=len(gold),  # in these data sets each hop is a fact of another article
        kind=str(record.fields.get("type", "")),
        metadata=others(record, *USED_FIELDS),
    )


def _contexts(record: Record) -> Iterator[tuple[str, str]]:
    for title, sentences in _pairs(record, "context"):
        if not isinstance(sentences, list):
            raise UserError(f"{record.place}: the context {title!r} is not a list of sentences")
        yield title, join_sentences(sentences)


def passages_by_title(contexts: Iterator[tuple[str, str]]) -> list[Passage]:
    """Converts distinct (title, text) pairs to passages; the id is the title, or `title#2`."""
    texts_of: dict[str, dict[str, None]] = {}  # dicts, because they keep the order of insertion
    for title, text in contexts:
        texts_of.setdefault(title, {})[text] = None
    return [
        # Gold passages are named by title, so that the first text of a title has it as its id.
        Passage(title if n == 1 else f"{title}#{n}", title, text)
        for title, texts in texts_of.items()
        for n, text in enumerate(texts, start=1)
    ]


def read_hotpotqa(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads questions with gold titles; every distinct context paragraph is a passage."""
    # A list, because the records are read twice: for questions, and for their contexts.
    records = list(read_records(path))
    contexts = (context for record in records for context in _contexts(record))
    return [_question(record) for record in records], passages_by_title(contexts)
