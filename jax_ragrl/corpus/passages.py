"""A collection of passages with a fingerprint: what an index is built for and checked against."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable

from jax_ragrl.corpus.formats import load_passages
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage


def fingerprint(passages: Iterable[Passage]) -> str:
    """First 16 hex digits of SHA-256 over ids, titles and texts, order included."""
    digest = hashlib.sha256()
    for passage in passages:
        # JSON keeps apart what plain concatenation would join: ("ab", "c") and ("a", "bc").
        digest.update(json.dumps(passage).encode("ascii") + b"\n")
    return digest.hexdigest()[:16]


def passage_text(passage: Passage) -> str:
    """What of a passage is searched: title and text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Passages in a fixed order, with unique ids. Equal passages give equal fingerprints.

    Raises:
      UserError: two passages share an id.
    """

    passages: tuple[Passage, ...]

    def __post_init__(self) -> None:
        counts = collections.Counter(passage.id for passage in self.passages)
        if len(counts) < len(self.passages):
            repeated, times = counts.most_common(1)[0]
            raise UserError(f"passage id {repeated!r} occurs {times} times: make the ids unique")

    def __len__(self) -> int:
        return len(self.passages)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits, see `fingerprint`."""
        return fingerprint(self.passages)


def load_corpus(path: pathlib.Path | str, format: str | None = None) -> Corpus:
    """The corpus of a file in any known passage format, plain or gzipped.

    Args:
      path: the file, or the folder of a BEIR set.
      format: a name from `jax_ragrl.corpus.formats.FORMATS`; None looks at the content.

    Raises:
      UserError: no passages, repeated ids, an unknown format or a malformed record.
    """
    passages = load_passages(path, format)
    try:
        return Corpus(tuple(passages))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def save_corpus(corpus: Corpus, path: pathlib.Path | str) -> None:
    """Writes JSONL `{"id", "title", "text"}`; equal corpora give equal bytes."""
    with pathlib.Path(path).open("wb") as file:
        for passage in corpus.passages:
            file.write(json.dumps(passage._asdict()).encode("ascii") + b"\n")
