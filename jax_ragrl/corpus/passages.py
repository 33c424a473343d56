"""A corpus: passages with a fingerprint, which an index is built for and checked against."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.corpus import store
from jax_ragrl.corpus.reading import AS_IS, Reading
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage


def fingerprint(passages: Iterable[Passage]) -> str:
    """First 16 hex digits of SHA-256 over ids, titles and texts, order included."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(store.row(passage))
    # 64 bits: short enough for messages and file names, and accidental collisions are negligible.
    return digest.hexdigest()[:16]


def passage_text(passage: Passage) -> str:
    """The text of a passage that is indexed: title and text on separate lines."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Passages in a fixed order, with unique ids. Equal passages give equal fingerprints.

    Fields:
      passages: a tuple, or passages on disk that are read one by one (`store.StoredPassages`).
      stored_fingerprint: the fingerprint of passages on disk, whose ids were checked when they
        were written; empty for passages in memory.
      reading: how the passages were read from a file, see `Reading.describe`; None: unknown.

    Raises:
      UserError: two passages share an id.
    """

    passages: Sequence[Passage]
    stored_fingerprint: str = dataclasses.field(default="", compare=False)
    reading: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        # Python's hashes differ between processes; here they are only compared with each other.
        if not self.stored_fingerprint:
            hashes = (hash(passage.id) for passage in self.passages)
            hash_X = np.fromiter(hashes, np.int64, len(self.passages))
            store.refuse_repeated(hash_X, self.passages)

    def __len__(self) -> int:
        return len(self.passages)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the passages, see the function `fingerprint`."""
        return self.stored_fingerprint or fingerprint(self.passages)


def load_corpus(
    path: pathlib.Path | str,
    format: str | None = None,
    folder: pathlib.Path | None = None,
    choose: Callable[[str], pathlib.Path] | None = None,
    reading: Reading = AS_IS,
) -> Corpus:
    """Reads the corpus of a file in any known passage format, plain or gzipped.

    Args:
      path: the file, or the folder of a BEIR set.
      format: a name from `jax_ragrl.corpus.formats.FORMATS`; None detects it from the content.
      folder: caches the passages on disk. The cache is written on the first call, and again if the
        file's size or modification time changes; otherwise the file is not read. None keeps the
        passages in memory.
      choose: see `store.write_passages`.
      reading: the names of fields, and the division into chunks.

    Raises:
      UserError: no passages, repeated ids, an unknown format, a malformed record, or a corpus that
        `choose` refuses: the folder then stays unchanged.
    """
    passages_on_disk = (
        None
        if folder is None
        else _cached_passages(pathlib.Path(path), format, folder, choose, reading)
    )
    if passages_on_disk is not None:
        return Corpus(passages_on_disk, passages_on_disk.fingerprint, reading.describe())
    # Without a cache, or if it cannot be written, the passages are kept in memory.
    passages = tuple(reading.passages(path, format))
    try:
        return Corpus(passages, reading=reading.describe())
    except UserError as error:
        # A corpus does not know the file that it was read from.
        raise UserError(f"{path}: {error}") from error


def _cached_passages(
    path: pathlib.Path,
    format: str | None,
    folder: pathlib.Path,
    choose: Callable[[str], pathlib.Path] | None,
    reading: Reading,
) -> store.StoredPassages | None:
    """Opens or writes the cache of a file's passages; None if the folder is not writable."""
    source = store.source_of(path, format, reading.describe())
    cache = store.open_passages(folder, source)
    if cache is not None:
        return cache
    # The message below concerns replaced caches only; a first read is expected.
    outdated, target = (folder / store.FILE).exists(), folder
    try:
        passages = reading.passages(path, format)
        target = store.write_passages(passages, folder, source, path, choose)
        if outdated and target == folder:
            print(f"ragrl: {path} is new or has changed: read into {folder}", file=sys.stderr)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # A read-only index folder is common on clusters and costs only memory.
        print(
            f"ragrl: warning: {folder} cannot be written: keeping {path} in memory", file=sys.stderr
        )
    # None if nothing was written: the caller then reads the file from its start.
    return store.open_passages(target, source)


def save_corpus(corpus: Corpus, path: pathlib.Path | str) -> None:
    """Writes JSON lines `{"id", "title", "text"}`; equal corpora give equal bytes."""
    # Bytes and ASCII escapes: text mode would translate line breaks on some platforms.
    with pathlib.Path(path).open("wb") as file:
        for passage in corpus.passages:
            file.write(json.dumps(passage._asdict()).encode("ascii") + b"\n")
