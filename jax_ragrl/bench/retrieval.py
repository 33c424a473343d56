"""Measures retrievers on question sets that name gold passages: quality and speed in one table.

A cell is one retriever on one set. It is written to `rows.jsonl` as soon as it is measured, so that
an interrupted table resumes; a cell that fails becomes an error and is tried again. Indexes are
kept in the work folder. The speed is that of searches of `BATCH` queries for ten passages that
compile nothing; building the index is not part of it.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.config.schema import one_of
from jax_ragrl.corpus.fields import NO_FIELDS
from jax_ragrl.corpus.formats import detect, has_passages, load_questions
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.corpus.reading import Reading, load_corpus
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.evaluation.suite import DataSet, markdown_table, parse_data
from jax_ragrl.models.safetensors_io import weights_checksum
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.kinds import LISTWISE
from jax_ragrl.retrieval.measures import DEPTH, KS
from jax_ragrl.retrieval.recall import mean_measures, report_missing_gold
from jax_ragrl.run.lock import lock_folder
from jax_ragrl.run.models import load_llm, policy_folder
from jax_ragrl.run.pipeline import LoadLLM
from jax_ragrl.run.retrievers import retriever_from
from jax_ragrl.run.short_names import SERVER, model_of, parse_llm
from jax_ragrl.runtime.caches import write_text
from jax_ragrl.runtime.compile_cache import compiled_programs
from jax_ragrl.runtime.jsonl import append_row, filter_rows, read_rows, write_json
from jax_ragrl.runtime.progress import progress
from jax_ragrl.runtime.revision import device_name, revision
from jax_ragrl.sampling.jobs import Shapes
from jax_ragrl.types import Hits, Question

BATCH = 32  # queries per search
MINILM = {"kind": "exact", "encoder": "minilm"}
# Scaled scores find more gold passages than reciprocal ranks on all sets of the documentation.
HYBRID = {"kind": "pipeline", "retrievers": ("bm25", MINILM), "fuse": "weighted", "candidates": 100}
RERANK = "hybrid+rerank"
# The config section `index` of each retriever.
SECTIONS: dict[str, dict[str, Any]] = {
    "hashed": {"kind": "exact", "encoder": "hashed"},
    "bm25": {"kind": "bm25"},
    "minilm": MINILM,
    "hybrid": {**HYBRID, "rerank": ""},
    RERANK: HYBRID,  # with the reranker that `sections` is given
}
COLUMNS = {
    "Set": "set",
    "Passages": "passages",
    "Questions": "questions",
    "Retriever": "retriever",
    **{f"Recall@{k}": f"recall@{k}" for k in KS},
    f"nDCG@{DEPTH}": f"ndcg@{DEPTH}",
    f"MRR@{DEPTH}": f"mrr@{DEPTH}",
    "Queries per s": "queries_per_s",
}
TITLE = "Gold passages among the hits, with the text of the question as the query"
Row = Mapping[str, Any]
Retrievers = Mapping[str, Mapping[str, Any]]
Fields = Mapping[str, str]  # names of fields in the files, see `corpus.formats.own`


class GoldSet(NamedTuple):
    """A question set of which each question names gold passages, and its corpus."""

    name: str
    corpus: Corpus
    questions: Sequence[Question]

    @property
    def identity(self) -> str:
        """The passages and questions, for cells that are read again."""
        return f"{self.corpus.fingerprint} {fingerprint(self.questions)}"


def sections(
    names: Sequence[str], reranker: str = "", llm: str = "", candidates: int = 0
) -> dict[str, dict[str, Any]]:
    """Returns the config section `index` of each retriever in `SECTIONS`, by its name.

    `candidates` are the hits that the two pipelines fuse and rerank; 0: as in `HYBRID`.
    """
    for name in names:
        one_of("--retrievers", name, SECTIONS)
    if RERANK in names and not reranker:
        raise UserError(
            f"{RERANK} needs a reranker: give the name or folder of a cross-encoder, --reranker, "
            f"or --reranker {LISTWISE} with a language model, --llm"
        )
    if reranker == LISTWISE and not llm:
        raise UserError(f"--reranker {LISTWISE} needs a language model: name it with --llm")
    result = {name: dict(SECTIONS[name]) for name in names}
    for name, section in result.items():
        if name == RERANK:
            section |= {**HYBRID, "rerank": reranker}
        if candidates and "candidates" in section:
            section["candidates"] = candidates
    return result


def parse_set(text: str, fields: Fields = NO_FIELDS) -> list[DataSet]:
    """Parses `[NAME=]QUESTIONS@CORPUS`, or a folder of sets."""
    data = parse_data(text)
    if data.corpus is not None:
        return [data]
    if data.questions.is_dir() and "=" not in text:
        return sets_in(data.questions, fields)
    # The questions of some formats come with their passages.
    if has_passages(data.questions, fields):
        return [data._replace(corpus=data.questions)]
    raise UserError(f"{text} names no corpus: give [NAME=]QUESTIONS@CORPUS, or a folder of sets")


def sets_in(folder: pathlib.Path, fields: Fields = NO_FIELDS) -> list[DataSet]:
    """Returns the sets of a folder: itself in BEIR's layout, or one per subfolder with gold.

    In a subfolder, the corpus is the largest file with "corpus" in its name, and the questions are
    the first file of the others, in alphabetical order, that holds questions with gold passages.
    """
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
    sets = [_set_in(path, fields) for path in (subfolders if not _is_beir(folder) else [folder])]
    if not any(sets):
        raise UserError(
            f"{folder} has no subfolder with a file named 'corpus' and questions that name gold "
            "passages: give [NAME=]QUESTIONS@CORPUS"
        )
    return [data for data in sets if data is not None]


def _is_beir(folder: pathlib.Path) -> bool:
    return any((folder / f"queries.jsonl{end}").is_file() for end in ("", ".gz"))


def _set_in(folder: pathlib.Path, fields: Fields) -> DataSet | None:
    name = folder.resolve().name
    if _is_beir(folder):
        return DataSet(name, folder, folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    corpora = [path for path in files if "corpus" in path.name]
    others = [path for path in files if corpora and path not in corpora]
    questions = next((path for path in others if _has_gold(path, fields)), None)
    if questions is None:
        return None
    return DataSet(name, questions, max(corpora, key=lambda path: path.stat().st_size))


def _has_gold(path: pathlib.Path, fields: Fields) -> bool:
    """Whether a file holds questions that name gold passages; `UserError` if they are faulty."""
    try:
        detect(path, "questions", fields)
    except UserError:  # a file of another form
        return False
    return any(question.gold for question in load_questions(path, fields))


def open_set(
    data: DataSet, workdir: pathlib.Path, limit: int = 0, fields: Fields = NO_FIELDS
) -> GoldSet:
    """Reads the first `limit` questions of a set that name gold (0: all), and its corpus."""
    assert data.corpus is not None, "parse_set sets it"
    questions = [question for question in load_questions(data.questions, fields) if question.gold]
    if not questions:
        raise UserError(f"{data.questions} names no gold passages: give another question file")
    folder = workdir / "passages" / data.name
    corpus = load_corpus(data.corpus, folder=folder, reading=Reading(fields))
    return GoldSet(data.name, corpus, questions[: limit or None])


def bench_retrieval(
    sets: Sequence[DataSet],
    retrievers: Retrievers,
    workdir: pathlib.Path,
    limit: int = 0,
    llm: str = "",
    fields: Fields = NO_FIELDS,
) -> list[Row]:
    """Measures each retriever, of `sections`, on each set.

    `workdir` holds indexes and finished cells (resumable); `limit` is the number of questions per
    set, from the first (0: all); `llm` the model of a listwise reranker, see `parse_llm`.

    Returns one row per set and retriever, in order; one that could not be measured has an `error`.
    """
    names = [data.name for data in sets]
    if repeated_names := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two sets are called {repeated_names[0]!r}: name them, NAME=...")
    lock_folder(workdir)
    file = workdir / "rows.jsonl"
    rows: list[Row] = []
    load = functools.cache(lambda: load_llm(parse_llm(llm), None, "", Shapes())) if llm else None
    # Cells that failed in an earlier call are measured again.
    filter_rows(file, lambda row: "error" not in row)
    with progress("measure", "cell", len(sets) * len(retrievers)) as bar:
        for data in sets:
            gold_set = open_set(data, workdir, limit, fields)
            missing = report_missing_gold(gold_set.questions, gold_set.corpus)
            for name, section in retrievers.items():
                bar.describe(f"{data.name} {name}")
                key = _key(gold_set, name, section, llm)
                finished = [row for row in read_rows(file) if key.items() <= row.items()]
                row = finished[-1] if finished else None
                if row is None:
                    row = key | missing | _cell(gold_set, name, section, workdir, load)
                    append_row(file, row)
                rows.append(row)
                bar.update(1)
    return rows


def _key(gold_set: GoldSet, retriever: str, section: Mapping[str, Any], llm: str) -> dict[str, Any]:
    """The fields that a cell must share with a finished one, as they are read again."""
    reader = {"llm": model_of(llm)} if section.get("rerank") == LISTWISE else {}
    # JSON has lists in place of tuples.
    index = {k: [*v] if isinstance(v, tuple) else v for k, v in section.items()}
    return {
        "set": gold_set.name,
        "retriever": retriever,
        "index": index,
        "data": gold_set.identity,
        "passages": len(gold_set.corpus),
        "questions": len(gold_set.questions),
        **reader,
        **_weights(section.get("rerank", ""), llm),
    }


def _weights(rerank: str, llm: str) -> dict[str, str]:
    """The checksum of the weights of a reranker, whose folder may be written again."""
    name = llm if rerank == LISTWISE else rerank
    if not name or name.startswith(SERVER):
        return {}
    try:
        return {"weights": weights_checksum(policy_folder(name))}
    except UserError:  # an error of the cell, see `_cell`
        return {}


def _cell(
    gold_set: GoldSet,
    name: str,
    section: Mapping[str, Any],
    workdir: pathlib.Path,
    llm: LoadLLM | None,
) -> dict[str, Any]:
    """Measures one retriever on one set; any failure is an error of this cell alone."""
    folder = workdir / "indexes" / gold_set.corpus.fingerprint
    try:
        start = time.perf_counter()
        # A pipeline, because its indexes have folders that other pipelines share.
        if section["kind"] != "pipeline":
            section = {"kind": "pipeline", "retrievers": (section,)}
        retriever = retriever_from(gold_set.corpus, section, folder, llm)
        build_s = round(time.perf_counter() - start, 2)
        return {"build_s": build_s} | measure(retriever, gold_set.questions)
    except Exception as error:  # any error: the other cells must not be lost
        message = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"ragrl: {gold_set.name}, {name}: {message}", file=sys.stderr)
        return {"error": message}


def measure(retriever: Retriever, questions: Sequence[Question]) -> dict[str, float]:
    """Returns the measures of a retriever on questions with gold passages, and `queries_per_s`."""
    texts = [question.text for question in questions]
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    # The last batch may be shorter, which is another program.
    for batch in {len(batch): batch for batch in batches}.values():
        retriever.search(batch, DEPTH)
    results: list[Hits | EffectError] = []
    total = 0.0
    for batch in batches:
        hits, seconds = _timed_search(retriever, batch)
        results += hits
        total += seconds
    measures = {name: round(x, 4) for name, x in mean_measures(questions, results).items()}
    return measures | {"queries_per_s": round(len(texts) / total, 1)}


def _timed_search(
    retriever: Retriever, queries: Sequence[str]
) -> tuple[Sequence[Hits | EffectError], float]:
    """Returns the hits of a search and its seconds; a search that compiles is made again."""
    for _ in range(2):
        programs, start = compiled_programs(), time.perf_counter()
        hits = retriever.search(queries, DEPTH)
        seconds = time.perf_counter() - start
        # An encoder has a program per length of text, so any batch may be the first of its length.
        if compiled_programs() == programs:
            break
    return hits, seconds


def table(rows: Iterable[Row], command: str) -> dict[str, Any]:
    """Returns the table as values for JSON, in the form of the files in `docs/data`."""
    commit = revision()
    return {
        "title": TITLE,
        "device": device_name(),
        "columns": [*COLUMNS],
        "rows": [
            {
                "cells": {x: row[name] for x, name in COLUMNS.items()},
                "command": command,
                "commit": commit,
                "group": row["set"],
            }
            for row in rows
            if "error" not in row
        ],
        "errors": [
            {name: row[name] for name in ("set", "retriever", "error")}
            for row in rows
            if "error" in row
        ],
    }


def markdown(values: Mapping[str, Any]) -> str:
    """Returns the result of `table` in Markdown, followed by the errors of its cells."""
    rows = [row["cells"].values() for row in values["rows"]]
    text = markdown_table(values["columns"], rows)
    errors = (f"- {e['retriever']} on {e['set']}: {e['error']}\n" for e in values["errors"])
    return f"{text}\n{''.join(errors)}".rstrip() + "\n"


def write_table(values: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes `PATH.json` and `PATH.md`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_name(f"{path.name}.json"), values)
    write_text(path.with_name(f"{path.name}.md"), markdown(values))
