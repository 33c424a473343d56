"""A collection of passages with a fingerprint: what an index is built for and checked against."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from jax_ragrl.corpus import store
from jax_ragrl.corpus.formats import iter_passages
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage


def fingerprint(passages: Iterable[Passage]) -> str:
    """First 16 hex digits of SHA-256 over ids, titles and texts, order included."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(store.row(passage))
    return digest.hexdigest()[:16]


def passage_text(passage: Passage) -> str:
    """What of a passage is searched: title and text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Passages in a fixed order, with unique ids. Equal passages give equal fingerprints.

    They are a tuple, or lie on disk (`store.StoredPassages`): of many, read those that are needed.
    `known` is the fingerprint of passages that were checked when they were stored.

    Raises:
      UserError: two passages share an id.
    """

    passages: Sequence[Passage]
    known: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.known:
            hashes = (hash(passage.id) for passage in self.passages)
            hash_X = np.fromiter(hashes, np.int64, len(self.passages))
            store.refuse_repeated(hash_X, self.passages)

    def __len__(self) -> int:
        return len(self.passages)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits, see `fingerprint`."""
        return self.known or fingerprint(self.passages)


def load_corpus(
    path: pathlib.Path | str,
    format: str | None = None,
    folder: pathlib.Path | None = None,
    of: str = "",
) -> Corpus:
    """The corpus of a file in any known passage format, plain or gzipped.

    Args:
      path: the file, or the folder of a BEIR set.
      format: a name from `jax_ragrl.corpus.formats.FORMATS`; None looks at the content.
      folder: where the passages are kept on disk: written first, and again where the file has
        another size or time of change; else opened without reading it. None holds them in memory.
      of: the fingerprint that what is kept must have, if any.

    Raises:
      UserError: no passages, repeated ids, an unknown format, a malformed record, or passages that
        are not `of`: the folder is then left as it is.
    """
    stored = None if folder is None else _stored(pathlib.Path(path), format, folder, of)
    if stored is not None:
        return Corpus(stored, stored.fingerprint)
    passages = tuple(iter_passages(path, format))
    try:
        return Corpus(passages)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _stored(
    path: pathlib.Path, format: str | None, folder: pathlib.Path, of: str
) -> store.StoredPassages | None:
    """The passages of a file as a folder holds them; None where it may not be written."""
    source = store.source_of(path, format)
    opened = store.open_passages(folder, source)
    if opened is not None:
        return opened
    older = (folder / store.FILE).exists()
    try:
        store.write_passages(iter_passages(path, format), folder, source, path, of)
        if older:
            print(f"ragrl: {path} is new or has changed: read into {folder}", file=sys.stderr)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        print(f"ragrl: {folder} cannot be written: holding {path} in memory", file=sys.stderr)
    return store.open_passages(folder, source)


def save_corpus(corpus: Corpus, path: pathlib.Path | str) -> None:
    """Writes JSONL `{"id", "title", "text"}`; equal corpora give equal bytes."""
    with pathlib.Path(path).open("wb") as file:
        for passage in corpus.passages:
            file.write(json.dumps(passage._asdict()).encode("ascii") + b"\n")
