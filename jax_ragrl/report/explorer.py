"""The explorer: one HTML file that filters, searches and compares answers, and shows trees.

The page has no external resources and works offline. Texts of models and passages are inserted as
text, never as HTML, and only the script of the page may run.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.report.load import TREES, by_step, read_lines
from jax_ragrl.report.trees import Numbers, compact_tree, shorten, stored_trees
from jax_ragrl.run.mistakes import mistake_of
from jax_ragrl.run.predictions import FOLDER
from jax_ragrl.runtime.caches import write_text
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.systems.registry import explain, known_faults
from jax_ragrl.types import Passage

FILES = ("explorer.html", "explorer.js", "trees.js")
MAX_BYTES = 15_000_000  # of a page, so that a browser opens it within seconds
# Characters of a passage, prompt or reply: the first of these with which the page is small enough.
TEXT_LIMITS = (4000, 1500, 600, 250, 100)


def build_explorer(sources: Sequence[pathlib.Path], out: pathlib.Path) -> pathlib.Path:
    """Writes the explorer of all predictions in folders of runs or tables, or files; returns `out`.

    `UserError` if a source holds none.
    """
    write_text(out, explorer_page(sources), errors="replace")
    return out


def explorer_page(sources: Sequence[pathlib.Path]) -> str:
    """Returns the page of all predictions and trees in some places, see `build_explorer`."""
    # Labels need the name of their source only if there are several.
    names = distinct_names(sources) if len(sources) > 1 else {}
    trees = {str(source): read_trees(source) for source in sources}
    files = [
        pair
        for source in sources
        # A run that keeps trees need not have been evaluated.
        if has_predictions(source) or not trees[str(source)]
        for pair in prediction_files(source, names.get(source, ""))
    ]
    page = ""
    for limit in TEXT_LIMITS:
        page = render(merge({label: predictions(file) for label, file in files}, trees, limit))
        # ASCII, because JSON escapes all other characters.
        if len(page) <= MAX_BYTES:
            break
    return page


def distinct_names(sources: Iterable[pathlib.Path]) -> dict[pathlib.Path, str]:
    """Returns the path of each source below their common folder; files have no `.jsonl`."""
    paths = {source: os.path.abspath(source).removesuffix(".jsonl") for source in sources}
    folder = os.path.commonpath([*map(os.path.dirname, paths.values())])
    return {source: os.path.relpath(path, folder) for source, path in paths.items()}


def read_trees(source: pathlib.Path) -> list[dict[str, Any]]:
    """Returns all stored trees of a run folder, see `stored_trees`; none for another place."""
    file = source / TREES
    return stored_trees(by_step(read_lines(file))) if file.is_file() else []


def has_predictions(folder: pathlib.Path) -> bool:
    """Returns whether a folder has predictions; a file is one of predictions."""
    if folder.is_file():
        return True
    return any((folder / FOLDER).rglob("*.jsonl")) or any(folder.glob(f"*/{FOLDER}/*.jsonl"))


def has_pages(folder: pathlib.Path) -> bool:
    """Returns whether the explorer has something to show of a folder: predictions or trees."""
    return has_predictions(folder) or bool(read_trees(folder))


def prediction_files(source: pathlib.Path, name: str = "") -> list[tuple[str, pathlib.Path]]:
    """Returns the prediction files of a folder or file with their labels, in order of their names.

    Labels begin with the name of the source, unless it is empty. `UserError` if there are none.
    """
    # One file may be compared as well, such as an evaluation before training.
    if source.is_file():
        return [(name or source.stem, source)]
    # A table over several question sets has one folder of predictions per set.
    files = sorted(source.rglob(f"{FOLDER}/*.jsonl"))
    if not files:
        raise _no_predictions(source)
    prefix = f"{name}/" if name else ""
    parts = [file.relative_to(source).with_suffix("").parts for file in files]
    labels = ("/".join(part for part in path if part != FOLDER) for path in parts)
    return [(prefix + label, file) for label, file in zip(labels, files, strict=True)]


def _no_predictions(source: pathlib.Path) -> UserError:
    return UserError(
        f"{source} holds no predictions: they are written by 'ragrl train', 'ragrl quickstart' "
        "and 'ragrl evaluate --predictions FOLDER'"
    )


QUESTION_FIELDS = ("id", "gold", "hops", "kind")
PREDICTION_FIELDS = ("answer", "scores", "costs", "finish_reason", "strategy", "faults")
FIELDS = {*QUESTION_FIELDS, *PREDICTION_FIELDS, "question", "gold_passages", "passages", "steps"}


def predictions(file: pathlib.Path) -> Iterator[Mapping[str, Any]]:
    """Yields the predictions in a file; `UserError` if it holds other records, or none."""
    row: Mapping[str, Any] = {}
    for row in read_rows(file):
        if not row.keys() >= FIELDS:
            break
        yield row
    if not row.keys() >= FIELDS:
        raise _no_predictions(file)


def merge(
    sources: Mapping[str, Iterable[Mapping[str, Any]]],
    trees: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
    limit: int = TEXT_LIMITS[0],
) -> dict[str, Any]:
    """Merges predictions by question, and adds the stored trees of runs.

    Returns:
      JSON values: `sources`, the labels; `passages`, the distinct passages as `[id, title, text]`;
      `questions`, each with its `rows`, pairs of a source number and a prediction whose passages
      are numbers in `passages`; `runs` and `trees` (see `compact_tree`, whose prompts are numbers
      in `texts`); `faults`, the sentences of the kinds that occur; and `limit`, if it is not the
      usual one.
    """
    numbers, texts = Numbers(), Numbers()
    questions: dict[tuple[str, str], dict[str, Any]] = {}
    for source, rows in enumerate(sources.values()):
        for row in rows:
            key = (str(row["id"]), str(row["question"]))
            # The first source describes the question; later ones only add their predictions.
            question = {name: row[name] for name in QUESTION_FIELDS}
            question = questions.setdefault(key, question | {"text": row["question"], "rows": []})
            question["rows"].append([source, _prediction(row, numbers, limit)])
    compact = [
        compact_tree(tree, run, texts, numbers, limit)
        for run, run_trees in enumerate(trees.values())
        for tree in run_trees
    ]
    kinds, faults = sorted({*_kinds(questions.values(), compact)}), known_faults()
    return {
        "sources": list(sources),
        "passages": [list(entry) for entry in numbers],
        "questions": list(questions.values()),
        "runs": list(trees),
        "trees": sorted(compact, key=lambda tree: -tree["spread"]),
        "texts": list(texts),
        "limit": limit if limit < TEXT_LIMITS[0] else None,
        "faults": {kind: text for kind in kinds if (text := explain(kind, faults))},
    }


def _prediction(row: Mapping[str, Any], numbers: Numbers, limit: int) -> dict[str, Any]:
    """The prediction of a row, whose passages are numbers."""
    passages, gold = [Passage(**p) for p in row["passages"]], set(row["gold_passages"])
    own_numbers = [numbers[p.id, p.title, shorten(p.text, limit)] for p in passages]
    return {name: row[name] for name in PREDICTION_FIELDS} | {
        "mistake": mistake_of(row),
        "steps": [
            {name: shorten(x, limit) if isinstance(x, str) else x for name, x in step.items()}
            for step in row["steps"]
        ],
        "passages": own_numbers,
        # Gold may name a passage by title or file, see `Passage.names`.
        "gold_passages": [n for n, p in zip(own_numbers, passages, strict=True) if p.names & gold],
    }


def _kinds(questions: Iterable[Any], trees: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The kinds of faults and the finish reasons in predictions and trees."""
    for question in questions:
        for _, row in question["rows"]:
            yield from (*row["faults"], row["finish_reason"])
    for tree in trees:
        yield from (node["why"] for node in tree["nodes"] if node.get("why"))


def render(data: Mapping[str, Any]) -> str:
    """Renders the page of merged predictions, see `merge`."""
    folder = importlib.resources.files("jax_ragrl.report")
    read = {name: (folder / name).read_text(encoding="utf-8") for name in FILES}
    # "</script>" in a text would end the data; JSON has the same character as an escape.
    values = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    # The functions of `trees.js` first, because `explorer.js` ends with the start of the page.
    script = read["trees.js"] + read["explorer.js"]
    # Only a script with this hash runs: text in the data cannot become one.
    digest = hashlib.sha256(script.encode()).digest()
    page = read["explorer.html"].replace("SCRIPT_HASH", base64.b64encode(digest).decode())
    head, middle, tail = page.split("PLACEHOLDER")
    return "".join((head, values, middle, script, tail))
