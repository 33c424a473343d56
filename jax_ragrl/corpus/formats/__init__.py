"""Data set formats, one file per format, and detection of the format from a file's content.

`load_questions` and `load_passages` look at the shape of a file (folder, JSON list, JSON lines,
table) and at the fields of its first record; `format=` overrides the detection.
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
from jax_ragrl.json_text import loads
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
# Formats of large corpora return passages lazily, so that 21 million never share the memory.
Reader = Callable[[pathlib.Path | str], tuple[list[Question], Iterable[Passage]]]


class Format(NamedTuple):
    """A file format.

    Fields:
      shape: `folder`, `parquet`, `object`, `records`, `tsv` or `csv`.
      fields: the fields of the first record by which the format is recognized.
      gives: `questions`, `passages`, or both.
      read: reads questions and passages from a path.
    """

    shape: str
    fields: frozenset[str]
    gives: frozenset[str]
    read: Reader


def _format(shape: str, fields: str, gives: frozenset[str], read: Reader) -> Format:
    return Format(shape, frozenset(fields.split()), gives, read)


# In order of precedence: the first format whose fields are all present is chosen.
FORMATS: dict[str, Format] = {
    "beir": _format("folder", "", BOTH, read_beir),
    "verl_parquet": _format("parquet", "", QUESTIONS, read_verl_parquet),
    "triviaqa": _format("object", "Data", QUESTIONS, read_triviaqa),
    # Any other JSON object: this format has no fixed fields, so that it follows `triviaqa`.
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
    # After several formats that have these two fields, too.
    "nq_open": _format("records", "question answer", QUESTIONS, read_nq_open),
    "flashrag_passages": _format("records", "id contents", PASSAGES, read_flashrag_passages),
    "passages_jsonl": _format("records", "id title text", PASSAGES, read_passages_jsonl),
    "beir_corpus": _format("records", "_id text", PASSAGES, read_beir_corpus),
    "multihop_rag_corpus": _format("records", "title body", PASSAGES, read_multihop_rag_corpus),
    # Last, because formats with ids have these fields too.
    "title_text": _format("records", "title text", PASSAGES, read_title_text),
}


class FileLook(NamedTuple):
    """The shape of a file, and the fields of its first record."""

    shape: str
    fields: frozenset[str]


def _first_of_list(text: str) -> Any:
    """Parses the first entry of a JSON list that may be truncated after it."""
    return json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]


def _look_at_list(path: pathlib.Path, text: str) -> FileLook:
    """Describes a file that starts with a bracket: a JSON list of records."""
    try:
        return FileLook("records", _names(_first_of_list(text)))
    except json.JSONDecodeError:
        # An empty list, an entry longer than the head, or malformed JSON: parse it all to know.
        if values := read_json(path):
            return FileLook("records", _names(values[0]))
        raise UserError(f"{path} is empty: give a file with records") from None


def _look_at_table(line: str) -> FileLook:
    """Describes a file whose first line is not JSON: the columns of a table."""
    shape, delimiter = ("tsv", "\t") if "\t" in line else ("csv", ",")
    try:
        names = next(csv.reader(io.StringIO(line), delimiter=delimiter), [])
    except csv.Error:  # a cell that is longer than the name of any column
        names = []
    return FileLook(shape, frozenset(names))


def _names(value: Any) -> frozenset[str]:
    return frozenset(value) if isinstance(value, dict) else frozenset()


def _look_at_objects(path: pathlib.Path, text: str) -> FileLook:
    """Describes a file that starts with a brace: JSON lines, or one object."""
    first, _, rest = text.lstrip().partition("\n")
    number = text[: len(text) - len(text.lstrip())].count("\n") + 1
    try:
        value = loads(first)
    except ValueError:
        # An object over several lines, or a malformed first line, which `parse_json` reports.
        spans_lines = not rest.lstrip().startswith("{")
        value = read_json(path) if spans_lines else parse_json(first, path, number)
        return FileLook("object", _names(value))
    # One line may be a whole file: TriviaQA's object, or titles with lists of sentences. One record
    # of JSON lines has values of several types.
    single = not rest.strip() and ("Data" in value or set(map(type, value.values())) == {list})
    return FileLook("object" if single else "records", _names(value))


def look(path: pathlib.Path | str) -> FileLook:
    """Returns the shape of a file and its first fields, from its content.

    Raises:
      UserError: the file is missing, empty, or neither UTF-8 text nor parquet.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return FileLook("folder", frozenset())
    # The head suffices in almost every case: a corpus may have tens of gigabytes.
    head = read_head(path)
    if head.startswith(PARQUET_MAGIC):
        return FileLook("parquet", frozenset())
    # Another encoding is reported when the records are read, with the position of the first bad
    # byte.
    text = head.decode("utf-8-sig", errors="replace")
    opening = text.lstrip()[:1]
    if not opening:
        raise UserError(f"{path} is empty: give a file with records")
    if opening == "[":
        return _look_at_list(path, text)
    return _look_at_objects(path, text) if opening == "{" else _look_at_table(text.splitlines()[0])


def _share(form: Format, file_look: FileLook) -> float:
    """Returns the share of a format's fields that the file has; 0 for another shape."""
    if form.shape != file_look.shape:
        return 0.0
    # A format without fields is recognized by its shape alone.
    return len(form.fields & file_look.fields) / len(form.fields) if form.fields else 1.0


def _check_gives(path: pathlib.Path | str, name: str, content: str | None) -> str:
    """Returns a format's name; raises `UserError` if the format lacks the requested content."""
    gives = FORMATS[name].gives
    if content is None or content in gives:
        return name
    raise UserError(
        f"{path} holds {' and '.join(gives)} ({name}), not {content}: give another file"
    )


def detect(path: pathlib.Path | str, content: str | None = None) -> str:
    """Returns the name in `FORMATS` of a file's format.

    Args:
      path: a file or a folder.
      content: `questions` or `passages` considers only the formats that contain them.

    Raises:
      UserError: no format fits; the message lists the fields of the file and all formats.
    """
    file_look = look(path)
    # All formats, whatever the requested content: passages that are passed as questions get an
    # error that names the actual content.
    complete = (name for name, form in FORMATS.items() if _share(form, file_look) == 1.0)
    if (match := next(complete, None)) is not None:
        return _check_gives(path, match, content)
    candidates = {
        name: form for name, form in FORMATS.items() if content is None or content in form.gives
    }
    nearest = max(candidates, key=lambda name: _share(candidates[name], file_look))
    # Half of the fields identify the intended format: its reader then names the missing field and
    # the line, which helps more than "unknown format".
    if _share(candidates[nearest], file_look) >= 0.5:
        return nearest
    fields = ", ".join(sorted(file_look.fields)[:12]) or "none"
    raise UserError(
        f"{path}: no known format of {content or 'data'} is {file_look.shape} with the fields "
        f"{fields}: convert it to one of {', '.join(candidates)}"
    )


def _load(
    path: pathlib.Path | str, format: str | None, content: str
) -> tuple[list[Question], Iterable[Passage]]:
    name = detect(path, content) if format is None else format
    one_of("format", name, FORMATS)
    return FORMATS[_check_gives(path, name, content)].read(path)


def load_questions(path: pathlib.Path | str, format: str | None = None) -> list[Question]:
    """Reads the questions of a file.

    Args:
      path: the file, plain or gzipped, or a BEIR folder.
      format: a name in `FORMATS`; None detects it from the content.

    Raises:
      UserError: no questions, unknown format, malformed JSON or a missing field; the message
        names file and line.
    """
    questions, _ = _load(path, format, "questions")
    if not questions:
        raise UserError(f"{path} holds no questions: give a file with at least one")
    return questions


def iter_passages(path: pathlib.Path | str, format: str | None = None) -> Iterator[Passage]:
    """Yields the passages of a file, including the contexts of its questions.

    Raises:
      UserError: no passages, unknown format, malformed JSON or a missing field; the message
        names file and line.
    """
    # Passages may be lazy, so that only the end of the iteration shows whether the file is empty.
    passage = None
    for passage in _load(path, format, "passages")[1]:
        yield passage
    if passage is None:
        raise UserError(f"{path} holds no passages: give a corpus with at least one")


def load_passages(path: pathlib.Path | str, format: str | None = None) -> list[Passage]:
    """Reads all passages of a file, see `iter_passages`."""
    return list(iter_passages(path, format))
