"""Documents as a corpus: `.txt`, `.md`, `.html` and `.pdf`, one file or a folder of them.

A passage is a page of a PDF, a section below a heading, or a whole text file. Its id is the path
of the file in the folder and the place in it as a URL fragment: `guide.md#install`, `a.pdf#page=3`
(RFC 8118). `corpus.chunks` divides long passages.
"""

from __future__ import annotations

import pathlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jax_ragrl.corpus.formats.files import read_text
from jax_ragrl.corpus.formats.html_text import Section, html_sections
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import HALF
from jax_ragrl.types import Passage, Question

HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.*)$")  # the ATX headings of CommonMark
FENCE = re.compile(r" {0,3}(```+|~~~+)")  # of a block of code, in which # begins no heading


def markdown_sections(lines: Iterable[str]) -> Iterator[Section]:
    """Yields the sections of Markdown, one per heading of any level."""
    heading, text, fence = "", list[str](), ""
    for line in lines:
        mark = FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        match = None if fence else HEADING.match(line)
        if match:
            yield Section(heading, "\n".join(text))
            heading, text = match[1].rstrip(" \t#"), []
        else:
            text.append(line)
    yield Section(heading, "\n".join(text))


def _pdf(path: pathlib.Path) -> Iterator[Section]:
    try:
        import pypdf
    except ImportError as error:
        raise UserError(
            f"{path} needs pypdf, which is not installed: run pip install 'jax_ragrl[documents]'"
        ) from error
    try:
        for n, page in enumerate(pypdf.PdfReader(path).pages, start=1):
            yield Section("", HALF.sub("\ufffd", page.extract_text()), f"page={n}")
    except Exception as error:  # pypdf raises nearly every kind of error for damaged files
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path}: unreadable PDF ({why}): repair or decrypt it, or remove it"
        ) from error


READERS: Mapping[str, Callable[[pathlib.Path], Iterable[Section]]] = {
    ".txt": lambda path: [Section("", read_text(path))],
    ".md": lambda path: markdown_sections(read_text(path).splitlines()),
    ".html": lambda path: html_sections(read_text(path)),
    ".htm": lambda path: html_sections(read_text(path)),
    ".pdf": _pdf,
}
SUFFIXES = frozenset(READERS)
# The kind of a shard by its name; other files of its folder may describe the set.
SHARD = re.compile(
    r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow)(\.(gz|bz2|xz|zip|zst))?$", re.IGNORECASE
)


def files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a folder and the folders below it, sorted, without hidden ones.

    A link to nothing is one of them: opening it fails, and otherwise it would be lost silently.
    """
    return [
        path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def document_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the documents of a folder and the folders below it, sorted, or a file alone.

    Raises:
      UserError: the file has another suffix than documents, or a link leaves the folder.
    """
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(
                f"{path} lacks the suffix of a document ({', '.join(READERS)}): give it alone"
            )
        return [path]
    files = list[pathlib.Path]()
    for file in files_below(path):
        if file.suffix.lower() not in SUFFIXES:
            continue
        # Otherwise a folder of someone else could put any file of this machine into a corpus.
        if file.is_symlink() and not file.resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"{file} is a link to {file.resolve()}, outside of {path}: copy the file into the "
                "folder, or remove the link"
            )
        files.append(file)
    return files


def _passages(file: pathlib.Path, name: str) -> Iterator[Passage]:
    """Yields the sections of a document that have text."""
    places, repeats, title = set[str](), Counter[str](), ""
    for section in READERS[file.suffix.lower()](file):
        # The first heading is the title of the document, as in most of them.
        title = title or section.heading
        # An anchor as GitHub writes it: lower case, with hyphens; repeated ones get a number.
        plain = re.sub(r"[^\w\s-]", "", section.heading.strip().lower())
        anchor = section.place or re.sub(r"\s", "-", plain)
        place = anchor
        while place in places:
            repeats[anchor] += 1
            place = f"{anchor}-{repeats[anchor]}"
        places.add(place)
        if text := section.text.strip():
            title_or_stem = title or pathlib.PurePosixPath(name).stem
            names = dict.fromkeys((title_or_stem, section.heading or title_or_stem))
            yield Passage(f"{name}#{place}" if place else name, " - ".join(names), text)


def read_documents(paths: Sequence[pathlib.Path]) -> tuple[list[Question], Iterator[Passage]]:
    """Reads passages lazily; a document without text is named in a warning.

    Raises:
      UserError: there are no documents, one cannot be read, or a package is not installed.
    """
    names: dict[pathlib.Path, str] = {}
    for path in paths:
        files = document_files(path)
        if not files:
            raise UserError(
                f"{path} holds neither a BEIR set (corpus.jsonl, queries.jsonl) nor documents "
                f"({', '.join(READERS)}) nor shards (.jsonl, .ndjson, .json, .csv, .tsv or "
                ".parquet): give a folder with such files"
            )
        root = path if path.is_dir() else path.parent
        # Half a surrogate pair stands for a byte of a name that is not UTF-8.
        names |= {file: HALF.sub("\ufffd", file.relative_to(root).as_posix()) for file in files}
        found = files_below(path) if path.is_dir() else []
        if shard := next((file for file in found if SHARD.search(file.name)), None):
            warnings.warn(
                f"{path} is read as documents, without its data files: if the passages are in "
                f"files such as {shard}, name these ({shard.parent}/*{shard.suffix})",
                stacklevel=2,
            )
    return [], _all_passages(names)


def _all_passages(names: Mapping[pathlib.Path, str]) -> Iterator[Passage]:
    empty = list[str]()
    for file, name in names.items():
        passage = None
        for passage in _passages(file, name):
            yield passage
        if passage is None:
            empty.append(name)
    if empty:
        warnings.warn(
            f"{len(empty)} documents have no text, such as {empty[0]}: a scanned PDF needs a text "
            "layer (OCR) first",
            stacklevel=2,
        )
