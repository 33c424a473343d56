"""HotpotQA's distractor records, and their extension in 2WikiMultiHopQA.

Yang et al. 2018, Ho et al. 2020: `_id, question, answer, supporting_facts [[title, sentence]],
context [[title, [sentence, ...]]]`, and in 2Wiki `evidences [[subject, relation, object]]`. On the
Hub these lists are also columns (`{title: [...], sentences: [...]}`) or texts of JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    as_list,
    joined,
    optional_text,
    others,
    question_text,
    read_records,
    text,
    unique,
)
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

# Supporting facts and evidences stay in the metadata: a question stores titles without sentences.
USED_FIELDS = ("_id", "id", "question", "answer", "context", "type")


def _tuples(record: Record, name: str, length: int) -> list[list[Any]]:
    """Returns the lists of a field, such as [title, value] pairs."""
    entries = [list(x.values()) if isinstance(x, dict) else x for x in as_list(record, name)]
    for n, entry in enumerate(entries, start=1):
        if not (isinstance(entry, list) and len(entry) == length and isinstance(entry[0], str)):
            raise UserError(
                f"{record.place}: {name} {n} is not a list of {length} that starts with a title: "
                "rewrite it"
            )
    return entries


def _question(record: Record) -> Question:
    facts = _tuples(record, "supporting_facts", 2)
    gold = unique(title for title, _ in facts)
    metadata = others(record, *USED_FIELDS) | {"supporting_facts": facts}
    if record.fields.get("evidences"):
        metadata["evidences"] = _tuples(record, "evidences", 3)
    return Question(
        # The official files have `_id`; some copies have `id`.
        id=text(record, "_id" if "_id" in record.fields else "id"),
        text=question_text(record, "question"),
        answers=answers(record, "answer"),
        gold=gold,
        hops=len(gold),  # in these data sets each hop is a fact of another article
        kind=optional_text(record, "type"),
        metadata=metadata,
    )


def _contexts(record: Record) -> Iterator[tuple[str, str]]:
    for title, sentences in _tuples(record, "context", 2):
        if not isinstance(sentences, list):
            raise UserError(f"{record.place}: the context {title!r} is not a list of sentences")
        yield title, joined(Record(f"{record.place}, context", {title: sentences}), title)


def passages_by_title(contexts: Iterator[tuple[str, str]]) -> list[Passage]:
    """Converts distinct (title, text) pairs to passages; the id is the title, or `title#2`."""
    texts_of: dict[str, dict[str, None]] = {}  # dicts, because they keep the order of insertion
    for title, content in contexts:
        texts_of.setdefault(title, {})[content] = None
    return [
        # Gold passages are named by title, so that the first text of a title has it as its id.
        Passage(title if n == 1 else f"{title}#{n}", title, content)
        for title, contents in texts_of.items()
        for n, content in enumerate(contents, start=1)
    ]


def read_hotpotqa(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions with gold titles; every distinct context paragraph is a passage."""
    # A list, because the records are read twice: for questions, and for their contexts.
    records = list(read_records(path))
    contexts = (context for record in records for context in _contexts(record))
    return [_question(record) for record in records], passages_by_title(contexts)
