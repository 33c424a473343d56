"""Evaluation suite: one results table of systems over several question sets.

Each cell is written when it is done. A cell that fails becomes an error in the table and does not
affect the others. An interrupted suite resumes: finished cells are read, failed ones are retried.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.config.schema import local
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.corpus.data_path import data_path, set_name
from jax_ragrl.corpus.formats import has_passages
from jax_ragrl.corpus.mixture import load_answered
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.questions import fingerprint, sample_in_order
from jax_ragrl.corpus.reading import Reading, load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import LEARNERS, BuildContext
from jax_ragrl.evaluation.table import (
    RUN,
    TableModels,
    TableSettings,
    build_context,
    error_row,
    evaluate_row,
    load_models,
    load_questions,
    open_retriever,
    select_systems,
    with_differences,
)
from jax_ragrl.models.safetensors_io import weights_checksum
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.description import read_description
from jax_ragrl.retrieval.kinds import BM25Index, parse_local_index
from jax_ragrl.retrieval.recall import report_gold
from jax_ragrl.rollout.costs import FREE
from jax_ragrl.run.checkpoint_name import parse_run
from jax_ragrl.run.index import load_retriever, server_retriever
from jax_ragrl.run.lock import lock_folder
from jax_ragrl.run.models import policy_folder
from jax_ragrl.run.pipeline import stored_models
from jax_ragrl.run.short_names import SERVER, parse_index
from jax_ragrl.run.world_folder import FILE as WORLD
from jax_ragrl.run.world_folder import READER
from jax_ragrl.runtime.caches import write_text
from jax_ragrl.runtime.jsonl import append_row, filter_rows, read_rows
from jax_ragrl.runtime.progress import progress
from jax_ragrl.text.metrics import METRIC_NAMES
from jax_ragrl.types import Question

CELL_SCORES = ("f1", "em", "cover_em")
PASSAGE_KEYS = ("corpus", "index")  # of a cell, see `_passages_of`
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
    """Parses `[NAME=]QUESTIONS[@CORPUS]`, two names as in `data_path`; see `set_name`."""
    name, equals, files = text.partition("=")
    if equals and not name:
        raise UserError(f"{text!r} names no set: give NAME=QUESTIONS, or QUESTIONS alone")
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
    """Evaluates systems on several question sets, with distinct names.

    Writes `workdir/table.md` and one line per cell to `workdir/rows.jsonl`. The folder holds one
    table, the indexes built for it by the `encoder` (or `bm25`), and cached web searches. The
    corpus and index of the settings serve sets without a corpus, a retriever serves all sets.

    Returns:
      The table in Markdown, and whether any cell has scores.
    """
    names, sets = select_systems(settings), with_corpora(settings, sets)
    lock_folder(workdir)
    cells = load_cells(workdir / "rows.jsonl")
    # Failed cells may have been caused by the settings, so a table without scores accepts others.
    save_config(workdir / "table.json", _fixed_settings(settings, encoder), renew=not cells)
    for data in sets:
        _check_inputs(settings, data, cells, workdir)
        _drop_outdated(workdir / "rows.jsonl", data, names, cells)
    open_set_retriever = _retriever_opener(settings, workdir, encoder)
    models = load_models(settings)
    finished = sum((data.name, name) in cells for data in sets for name in names)
    with progress("evaluate", "cell", len(sets) * len(names), initial=finished) as bar:
        for data in sets:
            if not (missing := [name for name in names if (data.name, name) not in cells]):
                continue
            opened = _open_set(settings, data, models, open_set_retriever, workdir)
            for name in missing:
                bar.describe(f"{data.name} {name}")
                cells[data.name, name] = cell = _evaluate_cell(name, opened, models)
                append_row(workdir / "rows.jsonl", {"data": data.name, "system": name, **cell})
                # Rewritten per cell, so that a table can be read while it grows.
                page = markdown(names, [d.name for d in sets], cells)
                write_text(workdir / "table.md", page)
                bar.update(1)
    page = markdown(names, [data.name for data in sets], cells)
    return page, any("error" not in cell for cell in cells.values())


def _fixed_settings(settings: TableSettings, encoder: str) -> dict[str, Any]:
    """The settings that all cells of a table share, as `table.json` stores them."""
    names = ("policy", "llm", "style", "top_k", "limit", "judge", "int8")
    values = {name: getattr(settings, name) for name in names} | {"encoder": encoder}
    optional = {  # stored only if set
        "overrides": settings.overrides,
        "retriever": settings.retriever,
        "examples": settings.policy_examples and [str(settings.policy_examples), settings.shots],
        "prices": settings.prices != FREE and dataclasses.asdict(settings.prices),
    }
    models = {name: getattr(settings, name) for name in ("policy", "llm", "judge")}
    # A folder may be written again under the same name.
    optional["weights"] = {
        name: weights_checksum(policy_folder(text))
        for name, text in models.items()
        if text and not text.startswith((SERVER, READER))
    }
    files = {"examples": settings.policy_examples}
    if settings.llm.startswith(READER):
        files["llm"] = local(settings.llm.removeprefix(READER).partition("#")[0]) / WORLD
    optional["files"] = {
        name: f"{zlib.crc32(file.read_bytes()):08x}"
        for name, file in files.items()
        if file and file.is_file()
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
    if has_passages(data.questions, settings.fields):
        return data.questions
    if settings.corpus is not None:
        return settings.corpus
    raise UserError(
        f"{data.questions} holds no passages: add its corpus (--data {data.questions}@CORPUS), or "
        "give one corpus or index for all such sets (--corpus, --index)"
    )


class OpenSet(NamedTuple):
    """A question set that is ready for evaluation; `passages` identifies its corpus or index."""

    context: BuildContext
    questions: Sequence[Question]
    passages: Mapping[str, str]


def _retriever_opener(
    settings: TableSettings, workdir: pathlib.Path, encoder: str
) -> Callable[[DataSet], Retriever]:
    """A function from a question set to its retriever: a server, a given index, or a new index."""
    if settings.retriever:
        server = server_retriever(parse_index(settings.retriever), workdir / "searches")
        return lambda data: server

    def open_set_retriever(data: DataSet) -> Retriever:
        if _is_indexed(settings, data):
            return open_retriever(settings)
        corpus = _load_passages(settings, data, workdir)
        index, name = parse_local_index(encoder), corpus.fingerprint
        # Another folder, because a table may first have been made with vectors.
        name = f"{name}-{index.kind}" if isinstance(index, BM25Index) else name
        index = dataclasses.replace(index, folder=str(workdir / "indexes" / name))
        return load_retriever(corpus, index, workdir)

    return open_set_retriever


def _is_indexed(settings: TableSettings, data: DataSet) -> bool:
    """Whether a set is searched with `--index`."""
    if not (settings.index_folder and settings.corpus and data.corpus):
        return False
    # The same file may be written as a relative and as an absolute path.
    return data.corpus.resolve() == settings.corpus.resolve()


def _load_passages(settings: TableSettings, data: DataSet, workdir: pathlib.Path) -> Corpus:
    """Loads the corpus of a set, which is cached in the work folder."""
    assert data.corpus is not None, "with_corpora sets it"
    digest = hashlib.sha256(str(data.corpus.resolve()).encode()).hexdigest()[:16]
    folder = workdir / "passages" / digest
    return load_corpus(data.corpus, folder=folder, reading=Reading(settings.fields))


def _passages_of(settings: TableSettings, data: DataSet, workdir: pathlib.Path) -> dict[str, str]:
    """Identifies the corpus of a set, or its index if `--index` is; empty if a server searches."""
    if data.corpus is None:
        return {}
    if not _is_indexed(settings, data):
        return {"corpus": _load_passages(settings, data, workdir).fingerprint}
    assert settings.index_folder is not None, "the set is searched with it"
    # The description holds the fingerprint of the passages, and the settings of the index.
    facts = read_description(settings.index_folder)
    if models := stored_models(facts, settings.index_folder):
        facts["models"] = models
    description = json.dumps(facts, sort_keys=True)
    return {"index": hashlib.sha256(description.encode()).hexdigest()[:16]}


def _open_set(
    settings: TableSettings,
    data: DataSet,
    models: TableModels,
    open_set_retriever: Callable[[DataSet], Retriever],
    workdir: pathlib.Path,
) -> OpenSet | dict[str, Any]:
    """Opens the retriever of a set and loads its questions; if that fails, returns its cells."""
    try:
        retriever = open_set_retriever(data)
        context = build_context(settings, models, retriever)
        if settings.predictions is not None:
            context = context._replace(predictions=settings.predictions / data.name)
        questions = load_questions(settings._replace(questions=data.questions))
        report_gold(retriever, questions)
        return OpenSet(context, questions, _passages_of(settings, data, workdir))
    except Exception as error:  # any error: the other sets must not be lost
        return error_row(error)


def _evaluate_cell(name: str, opened: OpenSet | dict[str, Any], models: TableModels) -> Cell:
    """The scores of one system on one set with its inputs, which another call must not mix."""
    if isinstance(opened, dict):
        return dict(opened)
    context, questions, passages = opened
    start = time.perf_counter()
    facts = {"questions": len(questions), "asked": fingerprint(questions), **passages}
    try:
        if name in LEARNERS:
            facts["train"] = fingerprint(context.train)
        if name.startswith(RUN):
            facts |= _checkpoint_of(name)
    except Exception as error:  # any error: the other cells must not be lost
        return error_row(error)
    row = evaluate_row(name, context, models, questions)
    return {**facts, "seconds": round(time.perf_counter() - start, 2), **row}


def _checkpoint_of(name: str) -> dict[str, int]:
    """The step of the checkpoint of a run, and a checksum: a folder may hold a new run."""
    run = parse_run(name.removeprefix(RUN))
    try:
        checkpoints, step = run.open()
    except UserError:
        if not run.name.isdecimal():
            raise
        # A run in training deletes older checkpoints, whose cells stay valid.
        return {"checkpoint": int(run.name)}
    sums = json.dumps(checkpoints.meta(step).get("checksums"), sort_keys=True)
    return {"checkpoint": step, "weights": zlib.crc32(sums.encode())}


def _drop_outdated(
    file: pathlib.Path, data: DataSet, names: Sequence[str], cells: dict[tuple[str, str], Cell]
) -> None:
    """Removes the cells of runs that have another checkpoint now, with a line on stderr."""
    for key in [(data.name, name) for name in names]:
        cell = cells.get(key, {})
        if "checkpoint" not in cell:
            continue
        now = _checkpoint_of(key[1])
        if all(cell.get(name, value) == value for name, value in now.items()):
            continue
        before, step = cell["checkpoint"], now["checkpoint"]
        line = f"ragrl: {key[1]} is evaluated on {data.name} again: the table has its step {before}"
        other = "another one of that step" if before == step else f"that of step {step}"
        print(f"{line}, and the checkpoint is now {other}", file=sys.stderr)
        del cells[key]
        filter_rows(file, lambda row: (row["data"], row["system"]) in cells)


def _check_inputs(
    settings: TableSettings, data: DataSet, cells: Cells, workdir: pathlib.Path
) -> None:
    """Raises `UserError` if the cells of a set were made with other inputs than these."""
    rows = [cell for (name, _), cell in cells.items() if name == data.name]
    if not rows:
        return
    asked = fingerprint(load_questions(settings._replace(questions=data.questions)))
    passages = _passages_of(settings, data, workdir)
    trained = {row["train"] for row in rows if "train" in row}
    other = ""
    if any(row.get("asked") != asked for row in rows):
        other = f"other questions than {data.questions}"
    elif any({key: row[key] for key in PASSAGE_KEYS if key in row} != passages for row in rows):
        index = settings.index_folder if "index" in passages else data.corpus
        other = f"another corpus or index than {index}"
    elif trained and settings.train is not None:
        questions = sample_in_order(load_answered(settings.train, settings.fields), settings.limit)
        if trained != {fingerprint(questions)}:
            other = f"other training questions than --train {settings.train}"
    if other:
        raise UserError(
            f"the table already has cells of {data.name!r} with {other}: give the set another name "
            "(--data NAME=FILE), or use another --workdir"
        )


def load_cells(file: pathlib.Path) -> dict[tuple[str, str], Cell]:
    """The finished cells of a table, by set and system; removes failed and truncated ones."""
    filter_rows(file, lambda row: "error" not in row)
    return {(row["data"], row["system"]): row for row in read_rows(file)}


def markdown(systems: Sequence[str], sets: Sequence[str], cells: Cells) -> str:
    """The table in Markdown, its intervals, the differences to its first row, and its errors."""
    rows: dict[str, dict[str, Any]] = {}  # by set
    for data in sets:
        own = with_differences({name: cells.get((data, name), {}) for name in systems})
        rows[data] = {name: row for name, row in own.items() if row}

    def table(names: Sequence[str], text_of: Callable[[Cell | None], str]) -> str:
        lines = [(name, *(text_of(rows[d].get(name)) for d in sets)) for name in names]
        return markdown_table(("system", *sets), lines)

    scores = " / ".join(METRIC_NAMES[name] for name in CELL_SCORES)
    has_prices = (
        " / dollars" if any("dollars" in c.get("costs", {}) for c in cells.values()) else ""
    )
    page = f"{scores} in percent; searches / model calls / tokens{has_prices} per answer\n\n"
    page += table(systems, format_cell)
    if any(row.get("ci95") for own in rows.values() for row in own.values()):
        page += f"\n95 % intervals of {scores}\n\n" + table(systems, format_intervals)
    if any("difference" in row for own in rows.values() for row in own.values()):
        page += f"\n{scores} minus that of {systems[0]} on the same questions, 95 % intervals\n\n"
        page += table(systems[1:], format_differences)
    errors = [
        f"- {name} on {data}: {message}\n"
        for data in sets
        for name in systems
        if (message := cell_error(rows[data].get(name, {})))
    ]
    return page + ("\n" + "".join(errors) if errors else "")


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def cell_error(cell: Cell) -> str:
    """The failures of a cell; empty if there are none."""
    if "error" in cell or "failed_with" not in cell:
        return str(cell.get("error", ""))
    failures = f"{cell['ended']['failed']} of {sum(cell['ended'].values())} questions"
    return f"{failures} failed and are left out, most often with: {cell['failed_with']}"


def format_cell(cell: Cell | None) -> str:
    """The text of a cell: scores, costs, and the numbers of failed and of unjudged questions."""
    if cell is None:
        return "…"
    if "error" in cell:
        return "error"
    failures, costs = cell["ended"].get("failed", 0), cell["costs"]
    scores = " / ".join(f"{cell[name]:.1f}" for name in CELL_SCORES)
    calls = costs["llm_calls"] + costs["policy_calls"]
    tokens = sum(costs[name] for name in CELL_TOKENS)
    price = f" / ${costs['dollars']:.3g}" if "dollars" in costs else ""
    counts = {"failed": failures, "without a verdict of the judge": cell.get("unjudged", 0)}
    suffix = price + "".join(f" ({count} {what})" for what, count in counts.items() if count)
    return f"{scores}; {costs['retrieval_calls']:.3g} / {calls:.3g} / {tokens:.0f}{suffix}"


def format_intervals(cell: Cell | None) -> str:
    """The 95 % intervals of the scores of a cell."""
    limits = (cell or {}).get("ci95", {})
    return " / ".join("[{:.1f}, {:.1f}]".format(*limits[x]) for x in CELL_SCORES if x in limits)


def format_differences(cell: Cell | None) -> str:
    """The differences of a cell to the first one of its column, with their 95 % intervals."""
    numbers = (cell or {}).get("difference", {})
    texts = ("{:+.1f} [{:+.1f}, {:+.1f}]".format(*numbers[x]) for x in CELL_SCORES if x in numbers)
    return " / ".join(texts)
