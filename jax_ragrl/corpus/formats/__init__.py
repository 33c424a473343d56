"""Data set formats, and detection of the format from a file's content.

The shape of a file (folder, document, object, records) and the fields of its first record decide,
whatever contains them (JSON, a table, parquet). Records of no published format are read by the
usual names of fields, see `own`.
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax_ragrl.corpus.fields import NAMES, NO_FIELDS, check_fields
from jax_ragrl.corpus.formats import flashrag, published
from jax_ragrl.corpus.formats.documents import read_documents
from jax_ragrl.corpus.formats.flashrag import save_questions as save_questions
from jax_ragrl.corpus.formats.look import FileLook, data_files, look
from jax_ragrl.corpus.formats.own import (
    MAIN,
    SHAPES,
    own_fields,
    read_own_passages,
    read_own_questions,
)
from jax_ragrl.corpus.formats.published import Reader, questions_of, with_contexts
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

QUESTIONS, PASSAGES, BOTH = ("questions",), ("passages",), ("questions", "passages")


class Format(NamedTuple):
    """A published file format."""

    shape: str  # folder, documents, object; records: JSON, JSON lines, a table or parquet
    fields: str  # of the first record, by which the format is recognized
    gives: tuple[str, ...]  # `questions`, `passages`, or both
    read: Reader

    def fits(self, file_look: FileLook) -> bool:
        """Whether a file may have this format."""
        shape = "records" if file_look.shape in SHAPES else file_look.shape
        return self.shape == shape and file_look.fields.issuperset(self.fields.split())


# In order of precedence: the first format whose fields are all present is chosen.
FORMATS: dict[str, Format] = {
    "beir": Format("folder", "", BOTH, published.read_beir),
    "triviaqa": Format("object", "Data", QUESTIONS, published.read_triviaqa),
    # Any other JSON object: this format has no fixed fields, so that it follows `triviaqa`.
    "title_sentences": Format("object", "", PASSAGES, published.read_title_sentences),
    "popqa": Format(
        "records", "question possible_answers", QUESTIONS, questions_of(published.popqa)
    ),
    "freshqa": Format("records", "question answer_0", QUESTIONS, questions_of(published.freshqa)),
    "flashrag_questions": Format(
        "records", "question golden_answers", QUESTIONS, questions_of(flashrag.read_question)
    ),
    "musique": Format(
        *("records", "question paragraphs question_decomposition", BOTH),
        with_contexts(published.musique, published.musique_contexts),
    ),
    "hotpotqa": Format(
        *("records", "question context supporting_facts", BOTH),
        with_contexts(published.hotpotqa, published.hotpotqa_contexts),
    ),
    "nq_oracle": Format(
        *("records", "question answers ctxs", BOTH),
        with_contexts(published.nq_oracle, published.nq_oracle_contexts),
    ),
    "multihop_rag": Format(
        "records", "query answer evidence_list", QUESTIONS, questions_of(published.multihop_rag)
    ),
    "ambignq": Format(
        "records", "question annotations", QUESTIONS, questions_of(published.ambignq)
    ),
    "verl": Format("records", "prompt reward_model", QUESTIONS, questions_of(published.verl)),
    # After several formats that have these two fields, too.
    "nq_open": Format("records", "question answer", QUESTIONS, published.read_nq_open),
    "flashrag_passages": Format("records", "id contents", PASSAGES, flashrag.read_passages),
    "documents": Format("documents", "", PASSAGES, read_documents),
}


def detect(path: pathlib.Path | str, content: str, fields: Mapping[str, str] = NO_FIELDS) -> str:
    """Returns the name in `FORMATS` of a file's format; `own_questions`, `own_passages`: of none.

    A file that has one of the `fields` of `own.own_fields` is read by these names.

    Raises:
      UserError: no format fits; the message lists the fields of the file and all formats.
    """
    return _detect(path, look(data_files(path)), content, fields)


def _detect(
    path: pathlib.Path | str, file_look: FileLook, content: str, fields: Mapping[str, str]
) -> str:
    is_own = _is_own(file_look, content, fields)
    # Given names describe this file: it has one, or its main field has one.
    given = {name: fields[name] for name in NAMES[content] if name in fields}
    if is_own and (MAIN[content] in given or not file_look.fields.isdisjoint(given.values())):
        return f"own_{content}"
    fitting = [name for name, form in FORMATS.items() if form.fits(file_look)]
    for name in fitting:
        if content in FORMATS[name].gives:
            return name
    if is_own:
        return f"own_{content}"
    mains = {"questions": "question=NAME,answer=NAME", "passages": "text=NAME"}
    mend = f", or name its fields with --fields {mains[content]}"
    one_object = ", or write each record on a line of its own, or all in one JSON list"
    mend = mend if file_look.shape in SHAPES else one_object * (file_look.shape == "object")
    if file_look.shape in ("csv", "tsv"):
        mend += "; the first row of a table names its fields: add one if it is missing"
    (other,) = {*BOTH} - {content}
    present = {name: field for name, field in fields.items() if field in file_look.fields}
    if not fitting and _is_own(file_look, other, present):
        fitting = [f"own_{other}"]
    if fitting:
        gives = " and ".join(FORMATS[fitting[0]].gives) if fitting[0] in FORMATS else other
        raise UserError(
            f"{path} holds {gives} ({fitting[0]}), not {content}: give another file{mend}"
        )
    names = ", ".join(sorted(file_look.fields)[:12]) or "none"
    known = ", ".join(name for name, form in FORMATS.items() if content in form.gives)
    raise UserError(
        f"{path}: no known format of {content} is {file_look.shape} with the fields {names}: "
        f"convert it to one of {known}{mend}"
    )


def _is_own(file_look: FileLook, content: str, fields: Mapping[str, str]) -> bool:
    """Whether records have the field that makes them questions or passages."""
    names = own_fields(content, file_look.fields, fields).names
    return file_look.shape in SHAPES and MAIN[content] in names


def has_passages(path: pathlib.Path | str, fields: Mapping[str, str] = NO_FIELDS) -> bool:
    """Whether a file of questions holds passages, too; arguments and errors as `detect`."""
    name = detect(path, "questions", fields)
    return name in FORMATS and "passages" in FORMATS[name].gives


def _load(
    path: pathlib.Path | str, content: str, fields: Mapping[str, str]
) -> tuple[list[Question], Iterable[Passage]]:
    check_fields(fields)
    files = data_files(path)
    file_look = look(files)
    name = _detect(path, file_look, content, fields)
    # No error, because one mapping may describe questions and passages, and several files.
    known = {field.lower().strip() for field in file_look.fields} | file_look.fields
    if unused := [
        f"{n}={fields[n]}" for n in NAMES[content] if fields.get(n, "") not in {"", *known}
    ]:
        warnings.warn(
            f"{path} is read as {name} of {content} without {', '.join(unused)}: its first record "
            f"has no such field, only {', '.join(sorted(file_look.fields)[:12])}",
            stacklevel=2,
        )
    if name in FORMATS:
        return FORMATS[name].read(files)
    own = own_fields(content, file_look.fields, fields)
    if content == "questions":
        return read_own_questions(files, own), []
    return [], read_own_passages(files, own)


def check_ids(questions: Sequence[Question], source: object) -> None:
    """Raises `UserError` if different questions of a `source` share an id; copies may."""
    texts: dict[str, str] = {}
    for question in questions:
        if (text := texts.setdefault(question.id, question.text)) != question.text:
            raise UserError(
                f"{source}: two questions have the id {question.id!r}, {text!r} and "
                f"{question.text!r}: make the ids unique, or list the original files separately "
                "(data.files.train=A,B), which does so"
            )


def load_questions(
    path: pathlib.Path | str, fields: Mapping[str, str] = NO_FIELDS
) -> list[Question]:
    """Reads the questions of files (`look.data_files`); `fields` as in `own.own_fields`.

    Raises:
      UserError: no questions, unknown format, malformed JSON or a missing field, where the message
        names file and line; or different questions of one id.
    """
    questions, _ = _load(path, "questions", fields)
    if not questions:
        raise UserError(f"{path} holds no questions: give a file with at least one")
    check_ids(questions, path)
    return questions


def iter_passages(
    path: pathlib.Path | str, fields: Mapping[str, str] = NO_FIELDS
) -> Iterator[Passage]:
    """Yields the passages of files, also of documents and of contexts; as `load_questions`."""
    # Passages may be lazy, so that only the end of the iteration shows whether the file is empty.
    passage = None
    for passage in _load(path, "passages", fields)[1]:
        yield passage
    if passage is None:
        raise UserError(f"{path} holds no passages: give a corpus with at least one")


def load_passages(path: pathlib.Path | str) -> list[Passage]:
    """Reads all passages of a file, see `iter_passages`."""
    return list(iter_passages(path))
