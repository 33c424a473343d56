"""A corpus: passages with a fingerprint, which an index is built for and checked against."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.corpus import store
from jax_ragrl.runtime.caches import draft_file
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
      stored_fingerprint: of passages on disk, whose ids were checked when they were written.
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


def save_corpus(corpus: Corpus, path: pathlib.Path | str) -> None:
    """Writes JSON lines `{"id", "title", "text"}`; equal corpora give equal bytes."""
    # Bytes and ASCII escapes: text mode would translate line breaks on some platforms.
    with draft_file(pathlib.Path(path)) as draft, draft.open("wb") as file:
        for passage in corpus.passages:
            file.write(json.dumps(passage._asdict()).encode("ascii") + b"\n")
