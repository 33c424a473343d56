"""Passages in a folder: written once, mapped into memory, read where they are asked for.

rows.jsonl   [id, title, text] of each passage; its SHA-256 begins with the corpus's fingerprint
offsets.npy  int64 [X + 1]: where each row begins, and where the last one ends
corpus.json  the fingerprint, and the files that the passages were read from; written last

`unfinished-*` are of processes that write, or were killed when they did: then they can be deleted.
"""

from __future__ import annotations

import array
import hashlib
import json
import mmap
import os
import pathlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
import tqdm

from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage

ROWS, OFFSETS, FILE = "rows.jsonl", "offsets.npy", "corpus.json"


def row(passage: Passage) -> bytes:
    """A passage as it is stored and fingerprinted."""
    # JSON keeps apart what plain concatenation would join: ("ab", "c") and ("a", "bc").
    return json.dumps(passage).encode("ascii") + b"\n"


def refuse_repeated(hash_X: np.ndarray, passages: Sequence[Passage]) -> None:
    """Raises `UserError` where two passages share an id; `hash_X` are int64 hashes of their ids.

    Only ids whose hashes are equal are read and counted: numbers take less room than strings.
    """
    sorted_X = np.sort(hash_X)
    twice = sorted_X[1:][sorted_X[1:] == sorted_X[:-1]]
    if not len(twice):
        return
    suspects = np.flatnonzero(np.isin(hash_X, twice)).tolist()
    repeated, times = Counter(passages[n].id for n in suspects).most_common(1)[0]
    if times > 1:
        raise UserError(f"passage id {repeated!r} occurs {times} times: make the ids unique")


class StoredPassages(Sequence[Passage]):
    """What `write_passages` wrote. Opening reads nothing of the rows; a passage is made anew each
    time it is asked for, and a slice is a tuple of its passages."""

    def __init__(self, folder: pathlib.Path):
        """Raises `OSError` or `ValueError` where the files are missing or not whole."""
        self.fingerprint = str(_read(folder)["fingerprint"])
        self._offsets = np.asarray(np.load(folder / OFFSETS, mmap_mode="r"))
        with (folder / ROWS).open("rb") as file:
            self._rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._rows) != self._offsets[-1]:
            raise ValueError(f"{folder / ROWS} is cut")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, n: int) -> Passage: ...
    @overload
    def __getitem__(self, n: slice) -> tuple[Passage, ...]: ...
    def __getitem__(self, n: int | slice) -> Passage | tuple[Passage, ...]:
        if isinstance(n, slice):
            return tuple(self[i] for i in range(len(self))[n])
        at = range(len(self))[n]
        start, end = self._offsets[at : at + 2].tolist()
        return Passage(*json.loads(self._rows[start:end]))


def _read(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text(encoding="utf-8"))


def source_of(path: pathlib.Path, format: str | None) -> list[Any]:
    """What tells a file, or those of a folder, from another: names, sizes, times of change.

    Raises `UserError` where there is none.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: give the path of a data file")
    files = sorted(filter(pathlib.Path.is_file, path.iterdir())) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    return [format, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]


def open_passages(folder: pathlib.Path, source: Any) -> StoredPassages | None:
    """The passages of a folder; None where none are, or these are of other files."""
    try:
        return StoredPassages(folder) if source in _read(folder)["sources"] else None
    except (OSError, ValueError):
        return None


def write_passages(
    passages: Iterable[Passage],
    folder: pathlib.Path,
    source: Any,
    path: pathlib.Path,
    of: str = "",
) -> None:
    """Writes passages one by one, with a progress bar; older ones are replaced once all are there.

    Args:
      source, path: of the file they are read from, see `source_of`.
      of: the fingerprint that they must have, if any.

    Raises:
      UserError: two passages share an id, or they are of another fingerprint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Apart until they are whole: another process may read the older ones, or write as well.
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as name:
        made = pathlib.Path(name)
        fingerprint, hash_X = _write_rows(passages, made)
        if of and fingerprint != of:
            raise UserError(
                f"index {folder.parent} was built for corpus {of}, but {path} holds {fingerprint}: "
                "rerun 'ragrl index', or give the corpus it was built for"
            )
        about = {"fingerprint": fingerprint, "sources": [*_same(folder, fingerprint), source]}
        (made / FILE).write_text(json.dumps(about) + "\n", encoding="utf-8")
        try:
            refuse_repeated(hash_X, StoredPassages(made))
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        # First gone, last written: what is there is whole.
        (folder / FILE).unlink(missing_ok=True)
        for part in (ROWS, OFFSETS, FILE):
            os.replace(made / part, folder / part)


def _write_rows(passages: Iterable[Passage], folder: pathlib.Path) -> tuple[str, np.ndarray]:
    """Writes rows and offsets; (the fingerprint, int64 [X] hashes of the ids)."""
    digest, offsets, hashes = hashlib.sha256(), array.array("q", [0]), array.array("q")
    with (folder / ROWS).open("wb") as file:
        for passage in tqdm.tqdm(passages, desc="read", unit="passage", disable=None):
            line = row(passage)
            file.write(line)
            digest.update(line)
            offsets.append(offsets[-1] + len(line))
            hashes.append(hash(passage.id))
    np.save(folder / OFFSETS, np.frombuffer(offsets, np.int64))
    return digest.hexdigest()[:16], np.frombuffer(hashes, np.int64)


def _same(folder: pathlib.Path, fingerprint: str) -> list[Any]:
    """The sources known to hold these passages: hosts may have copies of a file, of other times."""
    try:
        made = _read(folder)
    except (OSError, ValueError):
        return []
    return made["sources"] if made["fingerprint"] == fingerprint else []
