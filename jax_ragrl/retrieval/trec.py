"""Run files in TREC's format, which `trec_eval` and similar programs measure.

One line per passage: query id, `Q0`, passage id, rank from 1, score, tag. Columns are separated by
spaces, so that white space within an id is written as `_`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.runtime.caches import draft_file
from jax_ragrl.types import Hits, Passage


def column(text: str) -> str:
    """Returns a text as one column: each run of white space becomes `_`, an empty text `-`."""
    return "_".join(text.split()) or "-"


def by_rank(passages: Sequence[Passage]) -> Hits:
    """Returns passages with the score 1 / rank: readers of a run sort by score, not by rank."""
    return Hits(tuple(passages), tuple(1 / rank for rank in range(1, len(passages) + 1)))


def run_lines(query_id: str, hits: Hits, tag: str) -> Iterator[str]:
    """Yields the lines of one query.

    Programs that measure a run read float32 scores and order equal ones by the id of the passage.
    So a score that is not below the one before it becomes the next lower number.
    """
    names, lowest = (column(query_id), column(tag)), np.float32(-np.inf)
    below = -lowest
    pairs = zip(hits.passages, hits.scores, strict=True)
    for rank, (passage, score) in enumerate(pairs, start=1):
        below = min(np.float32(score), np.nextafter(below, lowest))
        yield f"{names[0]} Q0 {column(passage.id)} {rank} {below!s} {names[1]}\n"


def write_run(path: pathlib.Path, rankings: Iterable[tuple[str, Hits]], tag: str) -> None:
    """Writes a run file of (query id, hits) pairs; its folder is created if it is missing.

    `UserError` if two ids of queries or of passages would be one column.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    queries, passages = dict[str, str](), dict[str, str]()
    with draft_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        for query_id, hits in rankings:
            for ids, id in ((queries, query_id), *((passages, p.id) for p in hits.passages)):
                if (other := ids.setdefault(column(id), id)) != id:
                    raise UserError(
                        f"{path}: the ids {other!r} and {id!r} would both be {column(id)!r}, since "
                        "a run file has no white space within an id: rename one of them"
                    )
            file.writelines(run_lines(query_id, hits, tag))
