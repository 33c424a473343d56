"""Evaluation suite: one results table of systems over several question sets.

Each cell is written when it is done. A cell that fails becomes an error in the table and does not
affect the others. An interrupted suite resumes: finished cells are read, failed ones are retried.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tqdm

from jax_ragrl.config.kinds import BM25Index, parse_local_index
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.corpus.data_path import data_path, set_name
from jax_ragrl.corpus.formats import FORMATS, detect
from jax_ragrl.corpus.passages import load_corpus
from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.corpus.reading import Reading
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import BuildContext
from jax_ragrl.evaluation.table import (
    TableModels,
    TableSettings,
    build_context,
    evaluate_system,
    load_models,
    load_questions,
    open_retriever,
    outage_reason,
    select_systems,
)
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.recall import report_gold
from jax_ragrl.rollout.costs import FREE
from jax_ragrl.run.components import load_retriever, server_retriever
from jax_ragrl.run.config import parse_index
from jax_ragrl.run.evaluate import METRIC_NAMES
from jax_ragrl.runtime.jsonl import append_row, filter_rows, read_rows
from jax_ragrl.types import Question

CELL_SCORES = ("f1", "em", "cover_em")
CELL_TOKENS = ("llm_prompt_tokens", "llm_completion_tokens", "policy_tokens")
Cell = Mapping[str, Any]
Cells = Mapping[tuple[str, str], Cell]  # by question set and system


# QUESTIONS[@CORPUS]; on the Hub, an address may have a revision after another @.
FILES = re.compile(
    r"(?P<questions>hf://datasets/[^/@]*/[^/@]*@(refs/\w+/)?[^/@]*/[^@]*|[^@]*)(@(?P<corpus>.*))?",
    re.DOTALL,
)


class DataSet(NamedTuple):
    """A question set. Without a `corpus`, its passages are in `questions` or shared by all sets."""

    name: str
    questions: pathlib.Path
    corpus: pathlib.Path | None = None


def parse_data(text: str) -> DataSet:
    """Parses `[NAME=]QUESTIONS[@CORPUS]`.

    The default name is that of `set_name`; QUESTIONS and CORPUS are names as in `data_path`.
    """
    name, equals, files = text.partition("=")
    match = FILES.fullmatch(files if equals else text)
    assert match, "the pattern matches every text"
    questions, corpus = match["questions"], match["corpus"]
    return DataSet(
        name if equals else set_name(questions),
        data_path(questions),
        data_path(corpus) if corpus else None,
    )


def evaluate_suite(
    settings: TableSettings, sets: Sequence[DataSet], workdir: pathlib.Path, encoder: str
) -> tuple[str, bool]:
    """Evaluates systems on several question sets.

    Writes `workdir/table.md` and one line per cell to `workdir/rows.jsonl`.

    Args:
      settings: settings of every cell. The corpus and index serve sets without a
        corpus, a retriever serves all sets; `questions` is not used.
      sets: question sets with distinct names.
      workdir: holds one table, the indexes built for it, and cached web searches.
      encoder: encoder of these indexes, or `bm25`.

    Returns:
      The table in Markdown, and whether any cell has scores.
    """
    names, sets = select_systems(settings), with_corpora(settings, sets)
    cells = load_cells(workdir / "rows.jsonl")
    # Failed cells may have been caused by the settings, so a table without scores accepts others.
    save_config(workdir / "table.json", _fixed_settings(settings, encoder), renew=not cells)
    # Before models are loaded, which takes long.
    for data in sets:
        _check_questions(settings, data, cells)
    open_set_retriever = _retriever_opener(settings, workdir, encoder)
    models = load_models(settings)
    bar = tqdm.tqdm(total=len(sets) * len(names), unit="cell", disable=None)
    for data in sets:
        missing = [name for name in names if (data.name, name) not in cells]
        bar.update(len(names) - len(missing))
        open_set = _open_set(settings, data, models, open_set_retriever) if missing else None
        for name in missing:
            bar.set_description(f"{data.name} {name}")
            cells[data.name, name] = cell = _evaluate_cell(name, open_set, models)
            append_row(workdir / "rows.jsonl", {"data": data.name, "system": name, **cell})
            # Rewritten per cell, so that a table can be read while it grows.
            page = markdown(names, [d.name for d in sets], cells)
            (workdir / "table.md").write_text(page, encoding="utf-8")
            bar.update()
    bar.close()
    page = markdown(names, [data.name for data in sets], cells)
    return page, any("error" not in cell for cell in cells.values())


def _fixed_settings(settings: TableSettings, encoder: str) -> dict[str, Any]:
    """The settings that all cells of a table share, as `table.json` stores them."""
    names = ("policy", "llm", "style", "top_k", "limit", "judge", "int8")
    values = {name: getattr(settings, name) for name in names} | {"encoder": encoder}
    # Stored only if set; "changes" is the key in the files of earlier versions.
    optional = {
        "changes": settings.overrides,
        "retriever": settings.retriever,
        "limit_seed": settings.limit_seed,
        "examples": settings.policy_examples and [str(settings.policy_examples), settings.shots],
        "prices": settings.prices != FREE and dataclasses.asdict(settings.prices),
    }
    return values | {name: value for name, value in optional.items() if value}


def with_corpora(settings: TableSettings, sets: Sequence[DataSet]) -> list[DataSet]:
    """Adds the file of its passages to each set, unless a server searches for all sets.

    Raises:
      UserError: two sets have the same name, a set has no passages, or passages are given together
        with a server.
    """
    names = [data.name for data in sets]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two sets are called {duplicates[0]!r}: name them, --data NAME=QUESTIONS")
    if not settings.retriever:
        return [data._replace(corpus=_corpus_of(settings, data)) for data in sets]
    if settings.corpus or settings.index_folder or any(data.corpus for data in sets):
        raise UserError("--retriever searches for all sets: leave --index and corpora out")
    return list(sets)


def _corpus_of(settings: TableSettings, data: DataSet) -> pathlib.Path:
    if data.corpus is not None:
        return data.corpus
    if "passages" in FORMATS[detect(data.questions, "questions", settings.fields)].gives:
        return data.questions
    if settings.corpus is not None:
        return settings.corpus
    raise UserError(
        f"{data.questions} holds no passages: add its corpus (--data {data.questions}@CORPUS), or "
        "give one corpus or index for all such sets (--corpus, --index)"
    )


class OpenSet(NamedTuple):
    """A question set that is ready for evaluation; if opening it failed, only `error` is set."""

    context: BuildContext | None = None
    questions: Sequence[Question] = ()
    error: Cell | None = None


def _retriever_opener(
    settings: TableSettings, workdir: pathlib.Path, encoder: str
) -> Callable[[DataSet], Retriever]:
    """A function from a question set to its retriever: a server, a given index, or a new index."""
    if settings.retriever:
        server = server_retriever(parse_index(settings.retriever), workdir / "searches")
        return lambda data: server

    def open_set_retriever(data: DataSet) -> Retriever:
        assert data.corpus is not None, "with_corpora sets it"
        # The same file may be written as a relative and as an absolute path.
        is_shared = settings.corpus and data.corpus.resolve() == settings.corpus.resolve()
        if settings.index_folder and is_shared:
            return open_retriever(settings)
        return _open_index(data.corpus, workdir, encoder, Reading(settings.fields))

    return open_set_retriever


def _open_set(
    settings: TableSettings,
    data: DataSet,
    models: TableModels,
    open_set_retriever: Callable[[DataSet], Retriever],
) -> OpenSet:
    """Opens the retriever of a set and loads its questions."""
    try:
        retriever = open_set_retriever(data)
        context = build_context(settings, models, retriever)
        if settings.predictions is not None:
            context = context._replace(predictions=settings.predictions / data.name)
        questions = load_questions(settings._replace(questions=data.questions))
        report_gold(retriever, questions)
        return OpenSet(context, questions)
    except Exception as error:  # any error: the other sets must not be lost
        return OpenSet(error=_error_cell(error))


def _open_index(
    path: pathlib.Path, workdir: pathlib.Path, encoder: str, reading: Reading
) -> Retriever:
    """Opens the index of a corpus in the work folder, or builds it."""
    # The digest of the path keeps corpora with the same file name apart.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    corpus = load_corpus(path, folder=workdir / "passages" / digest, reading=reading)
    index, name = parse_local_index(encoder), corpus.fingerprint
    # Another folder, because a table may first have been made with vectors.
    name = f"{name}-{index.kind}" if isinstance(index, BM25Index) else name
    index = dataclasses.replace(index, folder=str(workdir / "indexes" / name))
    return load_retriever(corpus, index, workdir)


def _evaluate_cell(name: str, open_set: OpenSet | None, models: TableModels) -> Cell:
    """The scores of one system on one set, or an error."""
    assert open_set is not None, "a set with missing cells is open"
    if open_set.context is None:
        return dict(open_set.error or {})
    start = time.perf_counter()
    try:
        row = evaluate_system(name, open_set.context, models, open_set.questions)
    except Exception as error:  # any error: the other cells must not be lost
        return _error_cell(error)
    if reason := outage_reason({name: row}):  # the server failed, so there is no score
        return {"error": f"every question failed, most often with: {reason}"}
    seconds = round(time.perf_counter() - start, 2)
    # "asked" identifies the questions, so that a later call does not mix in other ones.
    facts = {"questions": len(open_set.questions), "asked": fingerprint(open_set.questions)}
    return {**facts, "seconds": seconds, **row}


def _check_questions(settings: TableSettings, data: DataSet, cells: Cells) -> None:
    """Raises `UserError` if the cells of a set belong to different questions."""
    before = {cell.get("asked") for (name, _), cell in cells.items() if name == data.name} - {None}
    if not before:
        return
    questions = load_questions(settings._replace(questions=data.questions))
    if before != {fingerprint(questions)}:
        raise UserError(
            f"the table already has cells of another question set named {data.name!r}: give "
            f"{data.questions} another name (--data NAME=FILE), or use another --workdir"
        )


def _error_cell(error: Exception) -> Cell:
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return {"error": message, "traceback": traceback.format_exc()}


def load_cells(file: pathlib.Path) -> dict[tuple[str, str], Cell]:
    """The finished cells of a table, by set and system; removes failed and truncated ones."""
    filter_rows(file, lambda row: "error" not in row)
    return {(row["data"], row["system"]): row for row in read_rows(file)}


def markdown(systems: Sequence[str], sets: Sequence[str], cells: Cells) -> str:
    """The table in Markdown, followed by the errors of its cells.

    Args:
      systems: names of the rows.
      sets: names of the columns.
      cells: cells by set and system; missing ones are shown as "…".
    """
    lines = [["system", *sets], ["---"] * (1 + len(sets))]
    lines += [[name, *(format_cell(cells.get((d, name))) for d in sets)] for name in systems]
    scores = " / ".join(METRIC_NAMES[name] for name in CELL_SCORES)
    has_prices = (
        " / dollars" if any("dollars" in c.get("costs", {}) for c in cells.values()) else ""
    )
    head = f"{scores} in percent; searches / model calls / tokens{has_prices} per answer\n\n"
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    errors = [
        f"- {name} on {data}: {message}\n"
        for data in sets
        for name in systems
        if (message := cell_error(cells.get((data, name), {})))
    ]
    return head + table + ("\n" + "".join(errors) if errors else "")


def cell_error(cell: Cell) -> str:
    """The failures of a cell; empty if there are none."""
    if "failed_with" not in cell:
        return str(cell.get("error", ""))
    failures = f"{cell['ended']['failed']} of {cell['questions']} questions"
    return f"{failures} failed and are left out, most often with: {cell['failed_with']}"


def format_cell(cell: Cell | None) -> str:
    """The text of a cell: scores, costs, and the number of questions that failed."""
    if cell is None:
        return "…"
    if "error" in cell:
        return "error"
    failures, costs = cell["ended"].get("failed", 0), cell["costs"]
    scores = " / ".join(f"{cell[name]:.1f}" for name in CELL_SCORES)
    calls = costs["llm_calls"] + costs["policy_calls"]
    tokens = sum(costs[name] for name in CELL_TOKENS)
    price = f" / ${costs['dollars']:.3g}" if "dollars" in costs else ""
    suffix = price + (f" ({failures} failed)" if failures else "")
    return f"{scores}; {costs['retrieval_calls']:.3g} / {calls:.3g} / {tokens:.0f}{suffix}"
