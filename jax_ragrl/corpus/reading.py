"""The way in which a file becomes passages: names of fields, and division into chunks."""

from __future__ import annotations

import dataclasses
import errno
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jax_ragrl.corpus import store
from jax_ragrl.corpus.chunks import WORDS, Chunks, Units, divide_all
from jax_ragrl.corpus.fields import NO_FIELDS
from jax_ragrl.corpus.formats import iter_passages
from jax_ragrl.corpus.formats.look import data_files
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage


class Reading(NamedTuple):
    """How the passages of a file are read: the names of fields, and a division into chunks."""

    fields: Mapping[str, str] = NO_FIELDS
    chunks: Chunks | None = None
    units: Units = WORDS

    def describe(self) -> dict[str, Any]:
        """Returns an identity for JSON; empty if the file is read as it is."""
        parts: dict[str, Any] = {"fields": dict(self.fields)} if self.fields else {}
        if self.chunks:
            parts["chunk"] = dataclasses.asdict(self.chunks) | {"units": self.units.name}
        return parts

    def passages(self, path: pathlib.Path | str) -> Iterator[Passage]:
        """Yields the passages of a file lazily; arguments and errors as `iter_passages`."""
        passages = iter_passages(path, self.fields)
        return divide_all(passages, self.chunks, self.units) if self.chunks else passages


AS_IS = Reading()  # the file as it is


def source_of(path: pathlib.Path, reading: Mapping[str, Any] = store.NO_READING) -> list[Any]:
    """Returns names, sizes and modification times of files; `UserError` if one is missing."""
    stats = []
    for top in data_files(path):
        if not top.exists():
            raise UserError(f"{top} does not exist: give the path of a data file")
        files = sorted(filter(pathlib.Path.is_file, top.rglob("*"))) if top.is_dir() else [top]
        root = top if top.is_dir() else top.parent
        # Names below the folder, so that a moved data set keeps its cache. Sizes and times instead
        # of a hash, which would take as long as reading the file.
        stats += [(file.relative_to(root).as_posix(), file.stat()) for file in files]
    parts = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return [*parts, *([dict(reading)] if reading else [])]


def load_corpus(
    path: pathlib.Path | str,
    folder: pathlib.Path | None = None,
    choose: Callable[[str], pathlib.Path] | None = None,
    reading: Reading = AS_IS,
) -> Corpus:
    """Reads the corpus of a file in any known passage format, plain or gzipped.

    A `folder` caches the passages on disk; they are written on the first call, and again if the
    file's size or modification time changes. Without one they are kept in memory.

    Raises:
      UserError: no passages, repeated ids, an unknown format, a malformed record, or a corpus that
        `choose` refuses: the folder then stays unchanged.
    """
    passages_on_disk = (
        None if folder is None else _cached_passages(pathlib.Path(path), folder, choose, reading)
    )
    if passages_on_disk is not None:
        return Corpus(passages_on_disk, passages_on_disk.fingerprint, reading.describe())
    # Without a cache, or if it cannot be written, the passages are kept in memory.
    passages = tuple(reading.passages(path))
    try:
        return Corpus(passages, reading=reading.describe())
    except UserError as error:
        # A corpus does not know the file that it was read from.
        raise UserError(f"{path}: {error}") from error


def _cached_passages(
    path: pathlib.Path,
    folder: pathlib.Path,
    choose: Callable[[str], pathlib.Path] | None,
    reading: Reading,
) -> store.StoredPassages | None:
    source = source_of(path, reading.describe())
    cache = store.open_passages(folder, source)
    if cache is not None:
        return cache
    outdated, target = (folder / store.FILE).exists(), folder
    try:
        passages = reading.passages(path)
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
