"""Data set formats, one file each, and the choice among them by what a file holds.

`load_questions` and `load_passages` look at the shape of a file (a folder, JSON list, JSON lines, a
table) and at the fields of its first record; `format=` overrides the choice.
"""

from __future__ import annotations

import csv
import io
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jax_ragrl.config.schema import one_of
from jax_ragrl.corpus.formats.ambignq import read_ambignq
from jax_ragrl.corpus.formats.beir import read_beir, read_beir_corpus
from jax_ragrl.corpus.formats.dpr import read_dpr
from jax_ragrl.corpus.formats.files import PARQUET_MAGIC, parse_json, read_head, read_json
from jax_ragrl.corpus.formats.flashrag import (
    read_flashrag_passages,
    read_flashrag_questions,
    save_questions,
)
from jax_ragrl.corpus.formats.freshqa import read_freshqa
from jax_ragrl.corpus.formats.hotpotqa import read_hotpotqa
from jax_ragrl.corpus.formats.multihop_rag import read_multihop_rag, read_multihop_rag_corpus
from jax_ragrl.corpus.formats.musique import read_musique
from jax_ragrl.corpus.formats.nq_open import read_nq_open, read_nq_oracle
from jax_ragrl.corpus.formats.passages_jsonl import read_passages_jsonl
from jax_ragrl.corpus.formats.popqa import read_popqa
from jax_ragrl.corpus.formats.title_sentences import read_title_sentences
from jax_ragrl.corpus.formats.title_text import read_title_text
from jax_ragrl.corpus.formats.triviaqa import read_triviaqa
from jax_ragrl.corpus.formats.verl import read_verl, read_verl_parquet
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

__all__ = [
    "FORMATS",
    "Format",
    "detect",
    "iter_passages",
    "load_passages",
    "load_questions",
    "save_questions",
]

QUESTIONS, PASSAGES = frozenset({"questions"}), frozenset({"passages"})
BOTH = QUESTIONS | PASSAGES
# Passages are read as they are asked for, where a format is one that large corpora have.
Reader = Callable[[pathlib.Path | str], tuple[list[Question], Iterable[Passage]]]


class Format(NamedTuple):
    """How a format looks (its shape and the fields that mark it), what it gives, how it is read."""

    shape: str
    fields: frozenset[str]
    gives: frozenset[str]
    read: Reader


def _format(shape: str, fields: str, gives: frozenset[str], read: Reader) -> Format:
    return Format(shape, frozenset(fields.split()), gives, read)


# In order of precedence: the first whose fields are all there is taken.
FORMATS: dict[str, Format] = {
    "beir": _format("folder", "", BOTH, read_beir),
    "verl_parquet": _format("parquet", "", QUESTIONS, read_verl_parquet),
    "triviaqa": _format("object", "Data", QUESTIONS, read_triviaqa),
    "title_sentences": _format("object", "", PASSAGES, read_title_sentences),
    "popqa": _format("tsv", "question possible_answers", QUESTIONS, read_popqa),
    "dpr": _format("tsv", "id text title", PASSAGES, read_dpr),
    "freshqa": _format("csv", "question answer_0", QUESTIONS, read_freshqa),
    "flashrag_questions": _format(
        "records", "question golden_answers", QUESTIONS, read_flashrag_questions
    ),
    "musique": _format("records", "question paragraphs question_decomposition", BOTH, read_musique),
    "hotpotqa": _format("records", "question context supporting_facts", BOTH, read_hotpotqa),
    "nq_oracle": _format("records", "question answers ctxs", BOTH, read_nq_oracle),
    "multihop_rag": _format("records", "query answer evidence_list", QUESTIONS, read_multihop_rag),
    "ambignq": _format("records", "question annotations", QUESTIONS, read_ambignq),
    "verl": _format("records", "prompt reward_model", QUESTIONS, read_verl),
    "nq_open": _format("records", "question answer", QUESTIONS, read_nq_open),
    "flashrag_passages": _format("records", "id contents", PASSAGES, read_flashrag_passages),
    "passages_jsonl": _format("records", "id title text", PASSAGES, read_passages_jsonl),
    "beir_corpus": _format("records", "_id text", PASSAGES, read_beir_corpus),
    "multihop_rag_corpus": _format("records", "title body", PASSAGES, read_multihop_rag_corpus),
    "title_text": _format("records", "title text", PASSAGES, read_title_text),
}


class Look(NamedTuple):
    """What a file looks like: its shape and the fields of its first record."""

    shape: str
    fields: frozenset[str]


def _first_of_list(text: str) -> Any:
    """The first entry of a JSON list of which only the beginning may be there."""
    return json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]


def _listed(path: pathlib.Path, text: str) -> Look:
    """A file that opens with a bracket: a JSON list of records."""
    try:
        return Look("records", _names(_first_of_list(text)))
    except json.JSONDecodeError:
        # No entry, one that is longer than the text, or JSON that breaks: which reading it tells.
        if values := read_json(path):
            return Look("records", _names(values[0]))
        raise UserError(f"{path} is empty: give a file with records") from None


def _table(line: str) -> Look:
    """A first line that is no JSON: the columns of a table."""
    shape, delimiter = ("tsv", "\t") if "\t" in line else ("csv", ",")
    names = next(csv.reader(io.StringIO(line), delimiter=delimiter), [])
    return Look(shape, frozenset(names))


def _names(value: Any) -> frozenset[str]:
    return frozenset(value) if isinstance(value, dict) else frozenset()


def _braced(path: pathlib.Path, text: str) -> Look:
    """A file that opens with a brace: JSON lines, or one object."""
    first, _, rest = text.lstrip().partition("\n")
    number = text[: len(text) - len(text.lstrip())].count("\n") + 1
    try:
        value = json.loads(first)
    except json.JSONDecodeError:
        # An object over several lines; or a broken first line, which parsing then reports.
        several = not rest.lstrip().startswith("{")
        value = read_json(path) if several else parse_json(first, path, number)
        return Look("object", _names(value))
    alone = not rest.strip() and ("Data" in value or set(map(type, value.values())) == {list})
    return Look("object" if alone else "records", _names(value))


def look(path: pathlib.Path | str) -> Look:
    """The shape of a file, from its content.

    Raises:
      UserError: the file is missing, empty, or neither UTF-8 text nor parquet.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return Look("folder", frozenset())
    head = read_head(path)
    if head.startswith(PARQUET_MAGIC):
        return Look("parquet", frozenset())
    text = head.decode("utf-8-sig", errors="replace")
    opening = text.lstrip()[:1]
    if not opening:
        raise UserError(f"{path} is empty: give a file with records")
    if opening == "[":
        return _listed(path, text)
    return _braced(path, text) if opening == "{" else _table(text.splitlines()[0])


def _share(form: Format, seen: Look) -> float:
    """The share of a format's fields that are there; 0 for another shape."""
    if form.shape != seen.shape:
        return 0.0
    return len(form.fields & seen.fields) / len(form.fields) if form.fields else 1.0


def _checked(path: pathlib.Path | str, name: str, wanted: str | None) -> str:
    """The format's name, unless it cannot give what is wanted."""
    gives = FORMATS[name].gives
    if wanted is None or wanted in gives:
        return name
    raise UserError(f"{path} holds {' and '.join(gives)} ({name}), not {wanted}: give another file")


def detect(path: pathlib.Path | str, wanted: str | None = None) -> str:
    """The name in `FORMATS` of what a file holds.

    Args:
      path: a file or a folder.
      wanted: `questions` or `passages` considers only the formats that give these.

    Raises:
      UserError: no format fits; the message lists what was seen and what is known.
    """
    seen = look(path)
    whole = next((name for name, form in FORMATS.items() if _share(form, seen) == 1.0), None)
    if whole is not None:
        return _checked(path, whole, wanted)
    known = {name: form for name, form in FORMATS.items() if wanted is None or wanted in form.gives}
    nearest = max(known, key=lambda name: _share(known[name], seen))
    # Half the fields are enough to know what a file is meant to be: its reader then says which
    # field is missing on which line.
    if _share(known[nearest], seen) >= 0.5:
        return nearest
    fields = ", ".join(sorted(seen.fields)[:12]) or "none"
    raise UserError(
        f"{path}: no known format of {wanted or 'data'} is {seen.shape} with the fields {fields}: "
        f"convert it to one of {', '.join(known)}"
    )


def _load(
    path: pathlib.Path | str, format: str | None, wanted: str
) -> tuple[list[Question], Iterable[Passage]]:
    name = detect(path, wanted) if format is None else format
    one_of("format", name, FORMATS)
    return FORMATS[_checked(path, name, wanted)].read(path)


def load_questions(path: pathlib.Path | str, format: str | None = None) -> list[Question]:
    """The questions of a file.

    Args:
      path: the file, plain or gzipped, or a BEIR folder.
      format: a name in `FORMATS`; None chooses by content.

    Raises:
      UserError: no questions, unknown format, malformed JSON or a missing field, with its place.
    """
    questions, _ = _load(path, format, "questions")
    if not questions:
        raise UserError(f"{path} holds no questions: give a file with at least one")
    return questions


def iter_passages(path: pathlib.Path | str, format: str | None = None) -> Iterator[Passage]:
    """The passages of a file one by one, the contexts of its questions included; as above.

    Raises:
      UserError: no passages, unknown format, malformed JSON or a missing field, with its place.
    """
    passage = None
    for passage in _load(path, format, "passages")[1]:
        yield passage
    if passage is None:
        raise UserError(f"{path} holds no passages: give a corpus with at least one")


def load_passages(path: pathlib.Path | str, format: str | None = None) -> list[Passage]:
    """All of `iter_passages`."""
    return list(iter_passages(path, format))
