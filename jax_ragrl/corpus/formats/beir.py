"""A BEIR folder: `corpus.jsonl`, `queries.jsonl`, `qrels/*.tsv`.

Thakur et al. 2021. Passages with a score above 0 are gold, by id. BEIR has no answers:
its questions measure retrieval only.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    optional_text,
    others,
    question_text,
    read_records,
    text,
)
from jax_ragrl.corpus.formats.qrels import read_qrels
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

# BEIR measures retrieval on test, if a set has judgments for it.
SPLITS = ("test", "dev", "train")


def _file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file in the folder, plain or gzipped."""
    candidates = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not candidates:
        raise UserError(f"{folder} has no {name}: give the folder of a BEIR data set")
    return candidates[0]


def _question(record: Record, gold: dict[str, list[str]]) -> Question:
    key = text(record, "_id")
    return Question(
        id=key,
        text=question_text(record, "text"),
        answers=(),
        gold=tuple(gold.get(key, ())),
        metadata=others(record, "_id", "text"),
    )


def read_beir(path: Source) -> tuple[list[Question], Iterator[Passage]]:
    """Reads all queries (without judgments they have no gold) and the passages."""
    folder = pathlib.Path(path if isinstance(path, str | pathlib.Path) else path[0])
    # The judgments of the first split that exists.
    judged = (folder / "qrels" / f"{split}.tsv" for split in SPLITS)
    gold = next((read_qrels(file) for file in judged if file.is_file()), {})
    queries = [_question(record, gold) for record in read_records(_file(folder, "queries.jsonl"))]
    # Lazy, although the queries are not: only the corpus is large.
    _, passages = read_beir_corpus(_file(folder, "corpus.jsonl"))
    return queries, passages


def read_beir_corpus(path: Source) -> tuple[list[Question], Iterator[Passage]]:
    """Reads passages `{_id, title, text}` lazily; the title may be missing."""
    return [], (
        Passage(text(record, "_id"), optional_text(record, "title"), text(record, "text"))
        for record in read_records(path)
    )
