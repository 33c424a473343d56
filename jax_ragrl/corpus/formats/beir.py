"""A BEIR folder: `corpus.jsonl`, `queries.jsonl`, `qrels/*.tsv`.

Thakur et al. 2021. Judged passages (score above 0) are gold, by id. BEIR has no answers, so its
questions serve to measure retrieval.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import Record, field, others, read_records
from jax_ragrl.corpus.formats.qrels import read_qrels
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

SPLITS = ("test", "dev", "train")


def _file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A file of the folder, plain or gzipped."""
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not found:
        raise UserError(f"{folder} has no {name}: give the folder of a BEIR set")
    return found[0]


def _qrels(folder: pathlib.Path) -> dict[str, list[str]]:
    """The judgements of the first split there is: test, dev, train."""
    paths = [folder / "qrels" / f"{split}.tsv" for split in SPLITS]
    return next((read_qrels(path) for path in paths if path.is_file()), {})


def _question(record: Record, gold: dict[str, list[str]]) -> Question:
    key = field(record, "_id", str)
    return Question(
        id=key,
        text=field(record, "text", str),
        answers=(),
        gold=tuple(gold.get(key, ())),
        metadata=others(record, "_id", "text"),
    )


def read_beir(path: pathlib.Path | str) -> tuple[list[Question], Iterator[Passage]]:
    """All queries, of which those without judgements have no gold, and the passages."""
    folder = pathlib.Path(path)
    gold = _qrels(folder)
    queries = [_question(record, gold) for record in read_records(_file(folder, "queries.jsonl"))]
    _, passages = read_beir_corpus(_file(folder, "corpus.jsonl"))
    return queries, passages


def _passage(record: Record) -> Passage:
    title = str(record.fields.get("title") or "")
    return Passage(field(record, "_id", str), title, field(record, "text", str))


def read_beir_corpus(path: pathlib.Path | str) -> tuple[list[Question], Iterator[Passage]]:
    """Passages `{_id, title, text}` one by one; the title may be missing."""
    return [], map(_passage, read_records(path))
