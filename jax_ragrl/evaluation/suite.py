"""One table of systems over several sets of questions; every cell is kept as soon as it is there.

A cell that fails is an error in the table and loses nothing else. A table that was cut off goes on
where it stood: cells that are there are read, those that failed are tried again.
"""

from __future__ import annotations

import hashlib
import pathlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tqdm

from jax_ragrl.config.schema import local
from jax_ragrl.config.snapshot import settle
from jax_ragrl.corpus.formats import FORMATS, detect
from jax_ragrl.corpus.passages import load_corpus
from jax_ragrl.corpus.questions import fingerprint, set_name
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import Bench
from jax_ragrl.evaluation.table import (
    Actors,
    Setting,
    chosen,
    load_actors,
    measured,
    open_bench,
    outage,
    questions_of,
    retriever_of,
)
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.run.components import open_or_build_index, served
from jax_ragrl.run.config import Index, parse_index
from jax_ragrl.run.evaluate import METRIC_NAMES
from jax_ragrl.runtime.jsonl import append, keep_rows, rows_of
from jax_ragrl.types import Question

SHOWN = ("f1", "em", "cover_em")
TOKENS = ("llm_prompt_tokens", "llm_completion_tokens", "policy_tokens")
Row = Mapping[str, Any]


class DataSet(NamedTuple):
    """A set of questions. `corpus` None: its own passages, or those that all such sets share."""

    name: str
    questions: pathlib.Path
    corpus: pathlib.Path | None = None


def parse_data(text: str) -> DataSet:
    """`[NAME=]QUESTIONS[@CORPUS]`; without a name, the file's own up to its first dot, or its
    folder's where it is called after a split."""
    name, named, files = text.partition("=")
    questions, _, corpus = (files if named else text).partition("@")
    path = local(questions)
    return DataSet(name if named else set_name(path), path, local(corpus) if corpus else None)


def survey(
    setting: Setting, sets: Sequence[DataSet], workdir: pathlib.Path, encoder: str
) -> tuple[str, bool]:
    """The table, in Markdown: `workdir/table.md`; its cells are the lines of `workdir/rows.jsonl`.

    Returned beside it is whether there is a cell that did not fail.

    Args:
      setting: of every cell. Its corpus and index serve sets that have none of their own, or its
        retriever all of them; its questions are not read.
      sets: with names that differ.
      workdir: holds one table, the indexes that were made for it, and what a search engine found.
      encoder: of these indexes.
    """
    names, sets = chosen(setting), with_corpora(setting, sets)
    fixed = ("policy", "llm", "style", "top_k", "limit", "judge", "int8")
    given = {k: getattr(setting, k) for k in fixed} | {"encoder": encoder}
    given |= {k: v for k in ("changes", "retriever") if (v := getattr(setting, k))}
    cells = kept(workdir / "rows.jsonl")
    settle(workdir / "table.json", given, renew=not cells)
    for data in sets:
        _check_asked(setting, data, cells)
    searched, actors = _searching(setting, workdir, encoder), load_actors(setting)
    bar = tqdm.tqdm(total=len(sets) * len(names), unit="cell", disable=None)
    for data in sets:
        missing = [name for name in names if (data.name, name) not in cells]
        bar.update(len(names) - len(missing))
        opened = _opened(setting, data, actors, searched) if missing else None
        for name in missing:
            bar.set_description(f"{data.name} {name}")
            cells[data.name, name] = made = _cell(name, opened, actors)
            append(workdir / "rows.jsonl", {"data": data.name, "system": name, **made})
            page = markdown(names, [d.name for d in sets], cells)
            (workdir / "table.md").write_text(page, encoding="utf-8")
            bar.update()
    bar.close()
    page = markdown(names, [data.name for data in sets], cells)
    return page, any("error" not in cell for cell in cells.values())


def with_corpora(setting: Setting, sets: Sequence[DataSet]) -> list[DataSet]:
    """The sets, each with the file that its passages are in, unless all are searched on a server.

    Raises:
      UserError: two sets have one name; one has no passages, or some beside a server.
    """
    names = [data.name for data in sets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two sets are called {twice[0]!r}: name them, --data NAME=QUESTIONS")
    if not setting.retriever:
        return [data._replace(corpus=_corpus_of(setting, data)) for data in sets]
    if setting.corpus or setting.index_folder or any(data.corpus for data in sets):
        raise UserError("--retriever searches for all sets: leave --index and corpora out")
    return list(sets)


def _corpus_of(setting: Setting, data: DataSet) -> pathlib.Path:
    if data.corpus is not None:
        return data.corpus
    if "passages" in FORMATS[detect(data.questions, "questions")].gives:
        return data.questions
    if setting.corpus is not None:
        return setting.corpus
    raise UserError(
        f"{data.questions} holds no passages: add its corpus (--data {data.questions}@CORPUS), or "
        "give one for all such sets (--corpus)"
    )


class Opened(NamedTuple):
    """A set that can be asked; or, in `error`, why it cannot."""

    bench: Bench | None = None
    questions: Sequence[Question] = ()
    error: Row | None = None


def _searching(
    setting: Setting, workdir: pathlib.Path, encoder: str
) -> Callable[[DataSet], Retriever]:
    """What a set is searched in: the server of all, the index that was given, or one made here."""
    if setting.retriever:
        server = served(parse_index(setting.retriever), workdir / "searches")
        return lambda data: server

    def searched(data: DataSet) -> Retriever:
        assert data.corpus is not None, "with_corpora names one"
        shared = setting.corpus and data.corpus.resolve() == setting.corpus.resolve()
        if setting.index_folder and shared:
            return retriever_of(setting)
        return _indexed(data.corpus, workdir, encoder)

    return searched


def _opened(
    setting: Setting, data: DataSet, actors: Actors, searched: Callable[[DataSet], Retriever]
) -> Opened:
    """The questions of a set, and what they are searched in."""
    try:
        bench = open_bench(setting, actors, searched(data))
        return Opened(bench, questions_of(setting._replace(questions=data.questions)))
    except Exception as error:  # whatever it is, the other sets are not lost
        return Opened(error=_failure(error))


def _indexed(path: pathlib.Path, workdir: pathlib.Path, encoder: str) -> DenseRetriever:
    """The index of a corpus in the work folder, made unless it is there."""
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    corpus = load_corpus(path, folder=workdir / "passages" / place)
    made = Index(encoder, folder=str(workdir / "indexes" / corpus.fingerprint))
    return open_or_build_index(corpus, made, workdir)


def _cell(name: str, opened: Opened | None, actors: Actors) -> Row:
    """What one system did on one set, or the error it failed with."""
    assert opened is not None, "a set with missing cells was opened"
    if opened.bench is None:
        return dict(opened.error or {})
    begun = time.perf_counter()
    try:
        found = measured(name, opened.bench, actors, opened.questions)
    except Exception as error:  # whatever it is, the other cells are not lost
        return _failure(error)
    if why := outage({name: found}):  # not a score
        return {"error": f"every question failed, most often with: {why}"}
    seconds = round(time.perf_counter() - begun, 2)
    asked = {"questions": len(opened.questions), "asked": fingerprint(opened.questions)}
    return {**asked, "seconds": seconds, **found}


def _check_asked(setting: Setting, data: DataSet, cells: Mapping[tuple[str, str], Row]) -> None:
    """`UserError` where a set's cells are of other questions."""
    before = {cell.get("asked") for (name, _), cell in cells.items() if name == data.name} - {None}
    if before and before != {fingerprint(questions_of(setting._replace(questions=data.questions)))}:
        raise UserError(
            f"the table has cells of other questions called {data.name!r} than {data.questions}: "
            "name these otherwise (--data NAME=FILE), or give another --workdir"
        )


def _failure(error: Exception) -> Row:
    told = " ".join(f"{type(error).__name__}: {error}".split())
    return {"error": told, "traceback": traceback.format_exc()}


def kept(file: pathlib.Path) -> dict[tuple[str, str], Row]:
    """The cells of a table that was begun, by set and system; failed and torn ones are dropped."""
    keep_rows(file, lambda row: "error" not in row)
    return {(row["data"], row["system"]): row for row in rows_of(file)}


def markdown(
    systems: Sequence[str], sets: Sequence[str], cells: Mapping[tuple[str, str], Row]
) -> str:
    """Systems by sets; under the table what went wrong in cells that failed."""
    lines = [["system", *sets], ["---"] * (1 + len(sets))]
    lines += [[name, *(shown(cells.get((d, name))) for d in sets)] for name in systems]
    head = " / ".join(METRIC_NAMES[name] for name in SHOWN)
    head = f"{head} in percent; searches / model calls / tokens of an answer\n\n"
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    faults = [
        f"- {name} on {data}: {told}\n"
        for data in sets
        for name in systems
        if (told := fault(cells.get((data, name), {})))
    ]
    return head + table + ("\n" + "".join(faults) if faults else "")


def fault(cell: Row) -> str:
    """What went wrong in a cell; empty where nothing did."""
    if "failed_with" not in cell:
        return str(cell.get("error", ""))
    failed = f"{cell['ended']['failed']} of {cell['questions']} questions"
    return f"{failed} failed and are left out, most often with: {cell['failed_with']}"


def shown(cell: Row | None) -> str:
    """A cell of the table: scores, costs, and how many questions the environment failed on."""
    if cell is None:
        return "…"
    if "error" in cell:
        return "error"
    failed, costs = cell["ended"].get("failed", 0), cell["costs"]
    scores = " / ".join(f"{cell[name]:.1f}" for name in SHOWN)
    calls = costs["llm_calls"] + costs["policy_calls"]
    tokens = sum(costs[name] for name in TOKENS)
    lost = f" ({failed} failed)" if failed else ""
    return f"{scores}; {costs['retrieval_calls']:.3g} / {calls:.3g} / {tokens:.0f}{lost}"
