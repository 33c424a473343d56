"""Passages on disk: written once, memory-mapped, and parsed on access.

rows.jsonl   [id, title, text] of each passage; its SHA-256 starts with the corpus's fingerprint
offsets.npy  int64 [X + 1]: the byte at which each row starts, and the byte at which the last ends
corpus.json  the fingerprint, and the files that the passages were read from; written last

Folders named `unfinished-*` belong to a process that is writing, or that was killed while writing;
in the second case the next process that reads or writes the passages removes them.
"""

from __future__ import annotations

import array
import hashlib
import json
import mmap
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads
from jax_ragrl.runtime.caches import draft_folder, remove_drafts
from jax_ragrl.runtime.progress import track
from jax_ragrl.types import Passage

ROWS, OFFSETS, FILE = "rows.jsonl", "offsets.npy", "corpus.json"
DRAFT = "unfinished-"
NO_READING: Mapping[str, Any] = MappingProxyType({})


def row(passage: Passage) -> bytes:
    """Returns the bytes of a passage that are stored and hashed."""
    # Plain concatenation would make ("ab", "c") and ("a", "bc") equal; JSON does not.
    return json.dumps(passage).encode("ascii") + b"\n"


def refuse_repeated(hash_X: np.ndarray, passages: Sequence[Passage]) -> None:
    """Raises `UserError` if two passages share an id; `hash_X` are int64 hashes of their ids.

    Only passages whose hashes are equal are read: 21 million hashes fit in memory, 21 million
    strings might not.
    """
    # Equal hashes are neighbors after sorting, which needs less memory than a set of 21 million.
    sorted_X = np.sort(hash_X)
    repeated_X = sorted_X[1:][sorted_X[1:] == sorted_X[:-1]]
    if not len(repeated_X):
        return
    # Different ids may share a hash, so that the ids themselves decide.
    suspects = np.flatnonzero(np.isin(hash_X, repeated_X)).tolist()
    passage_id, times = Counter(passages[n].id for n in suspects).most_common(1)[0]
    if times > 1:
        raise UserError(f"passage id {passage_id!r} occurs {times} times: make the ids unique")


class StoredPassages(Sequence[Passage]):
    """The passages of a folder written by `write_passages`.

    Opening the folder reads no rows. Each access parses a passage again; a slice is a tuple.
    """

    def __init__(self, folder: pathlib.Path):
        """Opens a folder; raises `OSError` or `ValueError` if files are missing or truncated."""
        self.fingerprint = str(_read(folder)["fingerprint"])
        # A plain array, because each access to a `np.memmap` creates an object of that subclass.
        self._offsets = np.asarray(np.load(folder / OFFSETS, mmap_mode="r"))
        with (folder / ROWS).open("rb") as file:
            self._rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # The cheapest check that the copy of a folder is complete; hashing would read all rows.
        if len(self._rows) != self._offsets[-1]:
            raise ValueError(f"{folder / ROWS} is truncated")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, n: int) -> Passage: ...
    @overload
    def __getitem__(self, n: slice) -> tuple[Passage, ...]: ...
    def __getitem__(self, n: int | slice) -> Passage | tuple[Passage, ...]:
        if isinstance(n, slice):
            return tuple(self[i] for i in range(len(self))[n])
        # A range resolves negative indices, and raises the IndexError that ends an iteration.
        at = range(len(self))[n]
        start, end = self._offsets[at : at + 2].tolist()
        return Passage(*json.loads(self._rows[start:end]))


def _read(folder: pathlib.Path) -> dict[str, Any]:
    value = loads((folder / FILE).read_bytes())
    if not isinstance(value, dict) or not {"fingerprint", "sources"} <= value.keys():
        raise ValueError(f"{folder / FILE} is damaged")
    return value


def open_passages(folder: pathlib.Path, source: Any) -> StoredPassages | None:
    """Opens the passages of a folder; None if they are missing, or from other files."""
    remove_drafts(folder, DRAFT)
    try:
        return StoredPassages(folder) if source in _read(folder)["sources"] else None
    except (OSError, ValueError):
        return None


def reading_of(folder: pathlib.Path, source: Sequence[Any]) -> dict[str, Any]:
    """Returns how passages were read from a `source` (of `source_of`), see `Reading.describe`."""
    try:
        sources = _read(folder)["sources"]
    except (OSError, ValueError):
        return {}
    length = len(source)
    ends = (s[length] for s in sources if s[:length] == source and len(s) == length + 1)
    return next((end for end in ends if isinstance(end, dict)), {})


def write_passages(
    passages: Iterable[Passage],
    folder: pathlib.Path,
    source: Any,
    path: pathlib.Path,
    choose: Callable[[str], pathlib.Path] | None = None,
) -> pathlib.Path:
    """Writes passages one by one, with a progress bar, and then replaces older ones at once.

    The `folder` holds the draft. `choose` returns the folder of the passages with a fingerprint, or
    raises `UserError`; None: always `folder`. `source` identifies the file (`source_of`).

    Returns:
      The folder that holds the passages.

    Raises:
      UserError: two passages share an id, or no folder is for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A separate folder until complete: another process may read the older files, or write too.
    with draft_folder(folder, DRAFT) as draft:
        fingerprint, hash_X = _write_rows(passages, draft)
        target = choose(fingerprint) if choose else folder
        sources = [*_sources_of(target, fingerprint), source]
        description = json.dumps({"fingerprint": fingerprint, "sources": sources})
        (draft / FILE).write_text(description + "\n", encoding="utf-8")
        try:
            # The draft is opened lazily, so that only passages with equal hashes are read.
            refuse_repeated(hash_X, StoredPassages(draft))
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        # Removed first and written last, so that its presence proves that all files are complete.
        target.mkdir(parents=True, exist_ok=True)
        (target / FILE).unlink(missing_ok=True)
        for part in (ROWS, OFFSETS, FILE):
            os.replace(draft / part, target / part)
    return target


def _write_rows(passages: Iterable[Passage], folder: pathlib.Path) -> tuple[str, np.ndarray]:
    # Arrays of eight bytes per entry: lists of Python integers need several times that.
    digest, offsets, hashes = hashlib.sha256(), array.array("q", [0]), array.array("q")
    with (folder / ROWS).open("wb") as file:
        for passage in track(passages, "read", "passage"):
            line = row(passage)
            file.write(line)
            digest.update(line)
            offsets.append(offsets[-1] + len(line))
            hashes.append(hash(passage.id))
    np.save(folder / OFFSETS, np.frombuffer(offsets, np.int64))
    return digest.hexdigest()[:16], np.frombuffer(hashes, np.int64)


def _sources_of(folder: pathlib.Path, fingerprint: str) -> list[Any]:
    """There may be several: copies of one file differ in their modification times."""
    try:
        description = _read(folder)
    except (OSError, ValueError):
        return []
    return description["sources"] if description["fingerprint"] == fingerprint else []
