"""Files of one's own: records with the field names in common use, or with names that are given.

Questions have a question, an answer (a string or a list) and optionally an id and the gold
passages; passages have a text and optionally a title and an id. Records come as JSON, JSON lines,
CSV, TSV or parquet. Names match in any case; a missing id becomes the position.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from jax_ragrl.corpus.fields import NAMES, NO_FIELDS
from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    joined,
    optional_text,
    others,
    question_text,
    read_records,
    texts,
    unique,
)
from jax_ragrl.corpus.formats.flashrag import split_contents
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

MAIN = {"questions": "question", "passages": "text"}  # the field without which there is no record
SHAPES = ("records", "csv", "tsv", "parquet")


class OwnFields(NamedTuple):
    """The names in a file of the fields, such as `question`, that it has.

    Fields:
      names: those in the first record.
      content: `questions` or `passages`.
      given: the names that replace the usual ones, as pairs.
    """

    names: Mapping[str, str]
    content: str
    given: tuple[tuple[str, str], ...] = ()

    def of(self, record: Record) -> OwnFields:
        """Returns the names in a record: each may have others, and one with a content counts."""
        filled = (name for name, value in record.fields.items() if not _is_blank(value))
        names = dict(self.names)
        for present in (frozenset(record.fields), frozenset(filled)):
            names |= _names_of(self.content, present, self.given)
        return self._replace(names=names)

    def read(self, record: Record, name: str) -> str:
        """Returns the name of a required field; raises `UserError` if the file lacks it."""
        if name in self.names and self.names[name] in record.fields:
            return self.names[name]
        present = ", ".join(map(str, record.fields)) or "none"
        known_names = self.names.get(name) or " or ".join(NAMES[self.content][name])
        raise UserError(
            f"{record.place}: field {known_names!r} is missing (fields: {present}): add it, or "
            f"name the field of the {name} with --fields {name}=NAME"
        )

    def id_of(self, record: Record, default: str) -> str:
        """Returns the id of a record; the default if the file has no ids, or this one is null."""
        return (
            optional_text(record, self.read(record, "id"), default)
            if "id" in self.names
            else default
        )


def own_fields(
    content: str, present: Collection[str], fields: Mapping[str, str] = NO_FIELDS
) -> OwnFields:
    """Returns the names of the fields of a file, given those that its first record has.

    The names in `fields` replace the usual ones; `id`, `title` and `gold` fall back to these,
    because one mapping may describe both questions and passages.
    """
    given = tuple(sorted(fields.items()))
    return OwnFields(_names_of(content, frozenset(present), given), content, given)


@functools.lru_cache(1024)  # most records of a file have the same fields
def _names_of(
    content: str, present: frozenset[str], given: tuple[tuple[str, str], ...]
) -> Mapping[str, str]:
    fields = dict(given)
    by_lower = {name.lower().strip(): name for name in sorted(present, reverse=True)}
    names = {}
    for name, usual in NAMES[content].items():
        # A given name of a main field must not be replaced silently: it may be misspelled.
        if name in fields and name in ("question", "answer", "text"):
            names[name] = fields[name]
            continue
        candidates = (*filter(None, [fields.get(name)]), *usual)
        matches = (c if c in present else by_lower.get(c) for c in candidates)
        if (match := next(filter(None, matches), None)) is not None:
            names[name] = match
    return names


def _is_blank(value: Any) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def read_own_questions(source: Source, own: OwnFields, prefix: str = "q") -> list[Question]:
    """Reads questions; without an id, it is `prefix` and position. `UserError` as for `text`."""
    questions = []
    for number, record in enumerate(read_records(source)):
        here = own.of(record)
        names = here.names
        # Judgments of a retriever need gold passages and no answer.
        has_answer = "answer" in names or "gold" not in names
        correct = answers(record, here.read(record, "answer")) if has_answer else ()
        if "answer" not in dict(own.given):
            _refuse_other_answers(record, names.get("answer", ""), correct)
        has_gold = names.get("gold") in record.fields
        question = Question(
            id=here.id_of(record, f"{prefix}{number}"),
            text=question_text(record, here.read(record, "question")),
            answers=correct,
            gold=unique(texts(record, names["gold"])) if has_gold else (),
            metadata=others(record, *names.values()),
        )
        questions.append(question)
    return questions


def _refuse_other_answers(record: Record, name: str, correct: tuple[str, ...]) -> None:
    """Raises `UserError` if another usual field holds other answers: they may be choices."""
    for other in ("answer", "answers", "golden_answers"):
        value = record.fields.get(other)
        if other == name or name == "output" or _is_blank(value) or isinstance(value, dict):
            continue
        if set(found := answers(record, other)) != set(correct):
            raise UserError(
                f"{record.place}: field {name!r} has the answers {', '.join(correct)}, and "
                f"{other!r} has {', '.join(found)}: name the right one with --fields answer=NAME"
            )


def read_own_passages(source: Source, own: OwnFields) -> Iterator[Passage]:
    """Yields passages lazily; errors as `read_own_questions`."""
    for number, record in enumerate(read_records(source)):
        here = own.of(record)
        name = here.read(record, "text")
        content = joined(record, name)
        title = optional_text(record, here.names.get("title", ""))
        if name == "contents":
            title, content = split_contents(content, title)
        yield Passage(here.id_of(record, f"p{number}"), title, content)
