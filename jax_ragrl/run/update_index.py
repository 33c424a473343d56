"""Additions to an index and removals from it: only new passages are encoded.

The new version is built next to the former one, in a subfolder; then `index.json` is replaced, so
that a kill leaves one of the two whole. A killed update resumes as a killed build does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.corpus import store
from jax_ragrl.corpus.chunks import WORDS
from jax_ragrl.corpus.formats.files import read_lines
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import AS_IS, Reading, source_of
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.bm25 import SETTINGS
from jax_ragrl.retrieval.description import (
    FILE,
    PASSAGES,
    VERSION,
    drop_versions,
    files_folder,
    next_version,
    read_description,
)
from jax_ragrl.retrieval.embed import KnownVectors
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.index import build_index, reading_of, reload_encoder, stored_corpus
from jax_ragrl.retrieval.kinds import HASHED_WORDS, BM25Index, PipelineIndex
from jax_ragrl.retrieval.shards import MappedArray
from jax_ragrl.run.index_folder import build_section
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import on_process_zero, process_zero_first
from jax_ragrl.types import CHUNK, Passage


@dataclasses.dataclass(frozen=True)
class Changes:
    """Changes of a corpus: remaining passages keep their order, those of the file `add` follow."""

    add: pathlib.Path | None
    removed_ids: frozenset[str]
    reading: Reading = AS_IS

    def source(self, fingerprint: str) -> list[Any]:
        """Identifies the changed corpus, given the fingerprint of the former one."""
        ids = hashlib.sha256(json.dumps(sorted(self.removed_ids)).encode()).hexdigest()
        reading = self.reading.describe()
        return [fingerprint, source_of(self.add, reading) if self.add else None, ids]


def update_index(
    folder: pathlib.Path, add: pathlib.Path | None = None, remove: pathlib.Path | None = None
) -> dict[str, Any]:
    """Adds passages to an index and removes others; implements `ragrl data index --add --remove`.

    A search has the hits of an index that is built from the changed corpus, except for the last
    bits of the encoder's arithmetic. The file `add` holds passages with new ids in any known
    format, which are divided, and their fields named, as those of the index; `remove` one id per
    line. Returns a report for JSON: corpus, kind, count, the numbers of `added` and `removed`
    passages, and `seconds`.

    Raises:
      UserError: no index, a pipeline, an id that the index lacks, one that occurs twice, or new
        passages for chunks of an unknown size.
    """
    start = time.perf_counter()
    description = read_description(folder)
    if description["kind"] == PipelineIndex.kind:
        raise UserError(
            f"{folder} is a pipeline, which has several indexes: rerun 'ragrl data index --corpus' "
            "on the changed passages"
        )
    former = stored_corpus(folder)
    reading = process_zero_first(lambda: former_reading(former, folder)) if add else AS_IS
    changes = Changes(add, read_ids(remove) if remove else frozenset(), reading)
    row_Y = remaining_rows(former.passages, changes.removed_ids, folder)
    version = on_process_zero(lambda: next_version(folder))
    corpus = process_zero_first(lambda: _write_corpus(folder, version, former, changes, row_Y))
    # The former version answers until the new one is complete, so that a kill leaves an index.
    _build(corpus, folder, version, row_Y)

    def publish() -> None:
        write_json(folder / FILE, {**read_description(folder / version), VERSION: version})
        drop_versions(folder)

    on_process_zero(publish)
    return {
        **{name: read_description(folder)[name] for name in ("corpus", "kind", "count")},
        "added": len(corpus) - len(row_Y),
        "removed": len(former) - len(row_Y),
        "seconds": round(time.perf_counter() - start, 2),
    }


def former_reading(former: Corpus, folder: pathlib.Path) -> Reading:
    """Returns how the passages of an index were read; `UserError` for chunks that do not say it."""
    if former.reading is None:
        if any(CHUNK.search(passage.id) for passage in former.passages):
            raise UserError(
                f"{folder} has chunks of passages, but {FILE} does not say how they were divided, "
                "so that new ones cannot be: rerun 'ragrl data index --corpus' with --chunk on all "
                "passages"
            )
        return AS_IS
    parts, encoder = dict(former.reading), read_description(folder).get("encoder", {})
    if parts.get("chunk", {}).get("units", WORDS.name) != WORDS.name and "source" in encoder:
        # The name of the units is the encoder as it was typed, maybe relative to another folder.
        parts["chunk"] = {**parts["chunk"], "units": encoder["source"]}
    return reading_of(parts)


def read_ids(path: pathlib.Path) -> frozenset[str]:
    """Reads a file with one id per line; blank lines and errors as in `read_lines`."""
    return frozenset(line.rstrip("\r\n") for _, line in read_lines(path))


def remaining_rows(
    passages: Sequence[Passage], removed_ids: frozenset[str], folder: pathlib.Path
) -> np.ndarray:
    """Returns the rows of the passages that remain, int64; `UserError` if the index lacks an id."""
    if not removed_ids:
        return np.arange(len(passages))
    is_removed_X = np.fromiter((x.id in removed_ids for x in passages), bool, len(passages))
    if is_removed_X.sum() < len(removed_ids):
        # The message names one id and counts the others, because there may be millions.
        absent = sorted(
            removed_ids - {passages[n].id for n in np.flatnonzero(is_removed_X).tolist()}
        )
        raise UserError(
            f"{folder} has no passage {absent[0][:80]!r} ({len(absent)} of {len(removed_ids)} "
            "ids are unknown): remove ids of the index only"
        )
    return np.flatnonzero(~is_removed_X)


def _write_corpus(
    folder: pathlib.Path, version: str, former: Corpus, changes: Changes, row_Y: np.ndarray
) -> Corpus:
    target, source = folder / version / PASSAGES, changes.source(former.fingerprint)
    if changes.add is None and not len(row_Y):
        raise UserError(f"every passage of {folder} is removed: keep one, or delete the folder")

    def passages() -> Iterator[Passage]:
        yield from (former.passages[n] for n in row_Y.tolist())
        if changes.add:
            yield from changes.reading.passages(changes.add)

    written_rows = store.open_passages(target, source)
    if written_rows is None:
        store.write_passages(passages(), target, source, changes.add or folder)
        written_rows = store.StoredPassages(target)
    return Corpus(written_rows, written_rows.fingerprint, former.reading)


def _build(corpus: Corpus, folder: pathlib.Path, version: str, row_Y: np.ndarray) -> None:
    description, files = read_description(folder), files_folder(folder)
    if description["kind"] == BM25Index.kind:
        settings = {name: description[name] for name in SETTINGS}
        build_section(corpus, BM25Index(**settings), folder / version)
        return
    known = None
    if description["encoder"]["kind"] == HASHED_WORDS:
        # The weights of the words depend on the whole corpus, and therefore all vectors do.
        encoder: Any = HashedEncoder.fit(corpus.passages, description["dimension"])
    else:
        encoder = process_zero_first(lambda: reload_encoder(description["encoder"], files))
        known = known_vectors(files / "vectors", row_Y, len(corpus))
    build_index(
        corpus,
        encoder,
        description["kind"],
        folder / version,
        dtype=description.get("dtype", "float32"),
        recall=description.get("search", {}).get("target", 0.0),
        known_vectors=known,
    )


def known_vectors(folder: pathlib.Path, row_Y: np.ndarray, count: int) -> KnownVectors | None:
    """Returns the vectors of the passages that remain; None if they were deleted.

    These have the former rows `row_Y`, and come first among the `count` passages.
    """
    if not folder.exists():  # an index of int8 searches without them
        return None
    row_X = np.full(count, -1, np.int64)
    row_X[: len(row_Y)] = row_Y
    return KnownVectors(MappedArray(folder), row_X)


def check_options(options: Mapping[str, Any]) -> None:
    """Raises `UserError` if the options of `ragrl data index` combine an update and a build."""
    for name in BUILD_OPTIONS:
        if options[name]:
            raise UserError(
                f"--{name.replace('_', '-')} is {options[name]}, but --add and --remove keep the "
                "settings of the index: leave it out, or build another index with --corpus"
            )


BUILD_OPTIONS = (
    *("corpus", "encoder", "kind", "dtype", "recall", "language", "retrievers", "fuse", "rerank"),
    *("candidates", "questions", "qrels", "vectors", "query_prefix"),
    *("passage_prefix", "chunk", "fields"),
)
