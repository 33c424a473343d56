"""The explorer of predictions: one HTML file that filters, searches and compares answers.

The page has no external resources and works offline. Texts of models and passages are inserted as
text, never as HTML, and only the script of the page may run.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.run.mistakes import mistake_of
from jax_ragrl.run.predictions import FOLDER
from jax_ragrl.runtime.jsonl import read_rows

FILES = ("explorer.html", "explorer.js")
MAX_TEXT = 4000  # characters of a passage, prompt or reply that the page shows


def build_explorer(sources: Sequence[pathlib.Path], out: pathlib.Path) -> pathlib.Path:
    """Writes the explorer of all predictions in some folders or files.

    Args:
      sources: folders of runs or tables (`ragrl train`, `evaluate`, `quickstart`), or files of
        predictions.
      out: the HTML file.

    Returns:
      `out`.

    Raises:
      UserError: a source holds no predictions.
    """
    out.write_text(explorer_page(sources), encoding="utf-8", errors="replace")
    return out


def explorer_page(sources: Sequence[pathlib.Path]) -> str:
    """Returns the page of all predictions in some folders or files, see `build_explorer`."""
    files = [pair for source in sources for pair in prediction_files(source, len(sources) > 1)]
    return render(merge({label: read_rows(file) for label, file in files}))


def has_predictions(folder: pathlib.Path) -> bool:
    """Returns whether a folder has predictions."""
    return any((folder / FOLDER).rglob("*.jsonl")) or any(folder.glob(f"*/{FOLDER}/*.jsonl"))


def prediction_files(source: pathlib.Path, with_folder: bool) -> list[tuple[str, pathlib.Path]]:
    """Returns the prediction files of a source with their labels, in order of their names.

    Args:
      source: a folder or one file.
      with_folder: whether labels begin with the name of the source.

    Raises:
      UserError: there are none.
    """
    # A table over several question sets has one folder of predictions per set.
    # One file may be compared as well, such as an evaluation before training.
    files = [source] if source.is_file() else sorted(source.rglob(f"{FOLDER}/*.jsonl"))
    if not files:
        raise UserError(
            f"{source} holds no predictions: they are written by 'ragrl train', 'ragrl quickstart' "
            "and 'ragrl evaluate --predictions FOLDER'"
        )
    prefix = f"{source.name}/" if with_folder and source.is_dir() else ""
    return [(prefix + _label(source, file), file) for file in files]


def _label(source: pathlib.Path, file: pathlib.Path) -> str:
    parts = file.relative_to(source).with_suffix("").parts if source.is_dir() else (file.stem,)
    return "/".join(part for part in parts if part != FOLDER)


QUESTION_FIELDS = ("id", "gold", "hops", "kind", "gold_passages")  # fields of a question
PREDICTION_FIELDS = (
    "answer",
    "scores",
    "costs",
    "finish_reason",
    "strategy",
    "faults",
)  # of a prediction


def merge(sources: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
    """Merges predictions by question.

    Args:
      sources: the rows of each source by its label, see `prediction_rows`.

    Returns:
      JSON values: `sources`, the labels; `passages`, the distinct passages as `[id, title, text]`;
      and `questions`, each with its `rows`, pairs of a source number and a prediction whose
      passages are numbers in `passages`.
    """
    numbers: dict[tuple[str, str, str], int] = {}
    questions: dict[tuple[str, str], dict[str, Any]] = {}
    for source, rows in enumerate(sources.values()):
        for row in rows:
            key = (str(row["id"]), str(row["question"]))
            # The first source describes the question; later ones only add their predictions.
            question_fields = {name: row[name] for name in QUESTION_FIELDS} | {
                "text": row["question"],
                "rows": [],
            }
            entries = [(p["id"], p["title"], _short(p["text"])) for p in row["passages"]]
            prediction = {name: row[name] for name in PREDICTION_FIELDS} | {
                # Computed here, so that predictions of earlier versions have it too.
                "mistake": mistake_of(row),
                "steps": [_short_step(step) for step in row["steps"]],
                "passages": [numbers.setdefault(entry, len(numbers)) for entry in entries],
            }
            questions.setdefault(key, question_fields)["rows"].append([source, prediction])
    return {
        "sources": list(sources),
        "passages": [list(entry) for entry in numbers],
        "questions": list(questions.values()),
    }


def _short_step(step: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _short(x) if isinstance(x, str) else x for name, x in step.items()}


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …"


def render(data: Mapping[str, Any]) -> str:
    """Renders the page of merged predictions, see `merge`."""
    folder = importlib.resources.files("jax_ragrl.report")
    read = {name: (folder / name).read_text(encoding="utf-8") for name in FILES}
    # "</script>" in a text would end the data; JSON has the same character as an escape.
    values = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    # Only a script with this hash runs: text in the data cannot become one.
    digest = hashlib.sha256(read["explorer.js"].encode()).digest()
    page = read["explorer.html"].replace("SCRIPT_HASH", base64.b64encode(digest).decode())
    head, middle, tail = page.split("PLACEHOLDER")
    return "".join((head, values, middle, read["explorer.js"], tail))
