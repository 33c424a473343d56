"""Data set formats, and detection of the format from a file's content.

`load_questions` and `load_passages` look at the shape of a file (folder, document, object, records)
and at the fields of its first record, whatever contains them (JSON, a table, parquet); `format=`
overrides the detection.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from jax_ragrl.config.schema import one_of
from jax_ragrl.corpus.fields import NAMES, NO_FIELDS, check_fields
from jax_ragrl.corpus.formats import published
from jax_ragrl.corpus.formats.documents import read_documents
from jax_ragrl.corpus.formats.files import Source
from jax_ragrl.corpus.formats.flashrag import (
    read_flashrag_passages,
    read_flashrag_questions,
    save_questions,
)
from jax_ragrl.corpus.formats.look import FileLook, data_files, look
from jax_ragrl.corpus.formats.own import (
    MAIN,
    SHAPES,
    own_fields,
    read_own_passages,
    read_own_questions,
)
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
CONTENTS = ("questions", "passages")
# Formats of large corpora return passages lazily, so that 21 million never share the memory.
Reader = Callable[[Source], tuple[list[Question], Iterable[Passage]]]


class Format(NamedTuple):
    """A file format.

    Fields:
      shape: `folder`, `documents`, `object` or `tsv`; `records`: JSON, JSON lines, a table or
        parquet; `own`: the same, if `own.own_fields` recognizes the fields.
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


def _own(
    path: pathlib.Path | str,
    source: Source,
    content: str | None,
    fields: Mapping[str, str] = NO_FIELDS,
) -> tuple[list[Question], Iterable[Passage]]:
    """Reads records by the usual names of fields, or by given ones.

    Args:
      path: as it was given, for error messages.
      source: the files.
      content: `questions` or `passages`; None: questions if there is a question.
      fields: the given names.

    Raises:
      UserError: there are no records: the format was given for another kind of file.
    """
    file_look = look(source)
    if file_look.shape not in SHAPES:
        raise UserError(
            f"{path} has no records (it looks like {file_look.shape}): give JSON, JSON lines, CSV, "
            "TSV or parquet, or name another format"
        )
    own = own_fields("questions", file_look.fields, fields)
    if content == "questions" or (content is None and MAIN["questions"] in own.names):
        return read_own_questions(source, own), []
    return [], read_own_passages(source, own_fields("passages", file_look.fields, fields))


def _read_own(source: Source) -> tuple[list[Question], Iterable[Passage]]:
    return _own(str(source), source, None)


def _read_passages(source: Source) -> tuple[list[Question], Iterable[Passage]]:
    return _own(str(source), source, "passages")


# In order of precedence: the first format whose fields are all present is chosen.
FORMATS: dict[str, Format] = {
    "beir": _format("folder", "", BOTH, published.read_beir),
    "triviaqa": _format("object", "Data", QUESTIONS, published.read_triviaqa),
    # Any other JSON object: this format has no fixed fields, so that it follows `triviaqa`.
    "title_sentences": _format("object", "", PASSAGES, published.read_title_sentences),
    "popqa": _format("records", "question possible_answers", QUESTIONS, published.read_popqa),
    "dpr": _format("tsv", "id text title", PASSAGES, _read_passages),
    "freshqa": _format("records", "question answer_0", QUESTIONS, published.read_freshqa),
    "flashrag_questions": _format(
        "records", "question golden_answers", QUESTIONS, read_flashrag_questions
    ),
    "musique": _format(
        "records", "question paragraphs question_decomposition", BOTH, published.read_musique
    ),
    "hotpotqa": _format(
        "records", "question context supporting_facts", BOTH, published.read_hotpotqa
    ),
    "nq_oracle": _format("records", "question answers ctxs", BOTH, published.read_nq_oracle),
    "multihop_rag": _format(
        "records", "query answer evidence_list", QUESTIONS, published.read_multihop_rag
    ),
    "ambignq": _format("records", "question annotations", QUESTIONS, published.read_ambignq),
    "verl": _format("records", "prompt reward_model", QUESTIONS, published.read_verl),
    # After several formats that have these two fields, too.
    "nq_open": _format("records", "question answer", QUESTIONS, published.read_nq_open),
    "flashrag_passages": _format("records", "id contents", PASSAGES, read_flashrag_passages),
    "passages_jsonl": _format("records", "id title text", PASSAGES, _read_passages),
    "beir_corpus": _format("records", "_id text", PASSAGES, _read_passages),
    "multihop_rag_corpus": _format("records", "title body", PASSAGES, _read_passages),
    # Last, because formats with ids have these fields too.
    "title_text": _format("records", "title text", PASSAGES, _read_passages),
    "documents": _format("documents", "", PASSAGES, read_documents),
    "own_questions": _format("own", "", QUESTIONS, _read_own),
    "own_passages": _format("own", "", PASSAGES, _read_own),
}


def _share(form: Format, file_look: FileLook) -> float:
    """Returns the share of a format's fields that the file has; 0 for another shape."""
    if form.shape != file_look.shape and not (
        form.shape == "records" and file_look.shape in SHAPES
    ):
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


def detect(
    path: pathlib.Path | str,
    content: str | None = None,
    fields: Mapping[str, str] = NO_FIELDS,
) -> str:
    """Returns the name in `FORMATS` of a file's format.

    Args:
      path: a file or a folder.
      content: `questions` or `passages` considers only the formats that contain them.
      fields: the names of fields in the file, see `own.own_fields`; a file that has one of them is
        read by these names.

    Raises:
      UserError: no format fits; the message lists the fields of the file and all formats.
    """
    return _detect(path, look(data_files(path)), content, fields)


def _detect(
    path: pathlib.Path | str, file_look: FileLook, content: str | None, fields: Mapping[str, str]
) -> str:
    own = None
    for kind in CONTENTS:
        # Records have the field that makes them questions or passages.
        names = own_fields(kind, file_look.fields, fields).names
        if content in (kind, None) and file_look.shape in SHAPES and MAIN[kind] in names:
            own = kind
            break
    if own:
        # Given names describe this file: it has one, or its main field has one.
        given = {name: fields[name] for name in NAMES[own] if name in fields}
        if MAIN[own] in given or any(name in file_look.fields for name in given.values()):
            return f"own_{own}"
    complete = [name for name, form in FORMATS.items() if _share(form, file_look) == 1.0]
    fitting = [name for name in complete if content is None or content in FORMATS[name].gives]
    if fitting:
        return fitting[0]
    if own:
        return f"own_{own}"
    if complete:
        # Passages that are passed as questions get an error that names the actual content.
        return _check_gives(path, complete[0], content)
    return _nearest(path, file_look, content)


def _nearest(path: pathlib.Path | str, file_look: FileLook, content: str | None) -> str:
    """Returns the format of which a file has at least half of the fields."""
    candidates = {
        name: form for name, form in FORMATS.items() if content is None or content in form.gives
    }
    nearest = max(candidates, key=lambda name: _share(candidates[name], file_look))
    # Half of the fields identify the intended format: its reader then names the missing field and
    # the line, which helps more than "unknown format".
    if _share(candidates[nearest], file_look) >= 0.5:
        return nearest
    names = ", ".join(sorted(file_look.fields)[:12]) or "none"
    wanted = {"questions": "question=NAME,answer=NAME", "passages": "text=NAME"}
    mend = f"name its fields with --fields {wanted[content]}, or " if content in wanted else ""
    raise UserError(
        f"{path}: no known format of {content or 'data'} is {file_look.shape} with the fields "
        f"{names}: {mend}convert it to one of {', '.join(candidates)}"
    )


def _load(
    path: pathlib.Path | str, format: str | None, content: str, fields: Mapping[str, str]
) -> tuple[list[Question], Iterable[Passage]]:
    if format is not None:
        one_of("format", format, FORMATS)
    check_fields(fields)
    files = data_files(path)
    name = _check_gives(path, format or _detect(path, look(files), content, fields), content)
    if name.startswith("own_"):
        return _own(path, files, content, fields)
    return FORMATS[name].read(files)


def load_questions(
    path: pathlib.Path | str,
    format: str | None = None,
    fields: Mapping[str, str] = NO_FIELDS,
) -> list[Question]:
    """Reads the questions of a file.

    Args:
      path: the file, plain or compressed, several (see `look.data_files`), or a BEIR folder.
      format: a name in `FORMATS`; None detects it from the content.
      fields: the names of fields in the file, see `own.own_fields`.

    Raises:
      UserError: no questions, unknown format, malformed JSON or a missing field; the message
        names file and line.
    """
    questions, _ = _load(path, format, "questions", fields)
    if not questions:
        raise UserError(f"{path} holds no questions: give a file with at least one")
    return questions


def iter_passages(
    path: pathlib.Path | str,
    format: str | None = None,
    fields: Mapping[str, str] = NO_FIELDS,
) -> Iterator[Passage]:
    """Yields the passages of a file, including the contexts of its questions.

    Args:
      path: the file, plain or compressed, a document, a folder of documents or of a BEIR set, or
        several files, see `look.data_files`.
      format: a name in `FORMATS`; None detects it from the content.
      fields: the names of fields in the file, see `own.own_fields`.

    Raises:
      UserError: no passages, unknown format, malformed JSON or a missing field; the message
        names file and line.
    """
    # Passages may be lazy, so that only the end of the iteration shows whether the file is empty.
    passage = None
    for passage in _load(path, format, "passages", fields)[1]:
        yield passage
    if passage is None:
        raise UserError(f"{path} holds no passages: give a corpus with at least one")


def load_passages(path: pathlib.Path | str, format: str | None = None) -> list[Passage]:
    """Reads all passages of a file, see `iter_passages`."""
    return list(iter_passages(path, format))
