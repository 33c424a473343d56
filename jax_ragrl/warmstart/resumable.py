"""Resumable generation of a JSONL file, chunk by chunk.

`ragrl warmup demos` and `ragrl warmup pool` call a language model for hours, which may cost money.
The rows of each chunk are appended immediately. A log next to the file has one line per finished
item, with its error if it failed; failed items are retried by the next run.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import UserError
from jax_ragrl.runtime.jsonl import append_row, filter_rows, read_rows
from jax_ragrl.runtime.progress import progress
from jax_ragrl.types import Question

CONTENT_KEYS = tuple(f"config.content.{name}" for name in ("questions", "corpora", "weights"))
CHUNK = 64  # items per rollout; a killed run loses at most one chunk


class Item(Protocol):
    """A unit of work, such as a question, with a unique `id`."""

    @property
    def id(self) -> str: ...


AnItem = TypeVar("AnItem", bound=Item)


class ItemResults(NamedTuple):
    """Rows generated for some items, and the error message of each failed item by its id."""

    rows: Sequence[Mapping[str, Any]]
    errors: Mapping[str, str]


class OutputKind(NamedTuple):
    """The names of an item (the key of its id in every row) and of rows (a key of the log)."""

    item: str
    rows: str

    def log(self, out: pathlib.Path) -> pathlib.Path:
        """Returns the path of the log: one line per item with its number of rows and its error.

        A failed item may have rows too, from other branches of its rollout.
        """
        return out.with_suffix(f".{self.item}s.jsonl")


def run_resumable(
    source: Callable[[Sequence[AnItem]], ItemResults],
    items: Sequence[AnItem],
    out: pathlib.Path,
    kind: OutputKind,
) -> None:
    """Appends the rows of all unfinished items to a file; failed items are retried last.

    The `source` generates the rows of some items.

    Raises:
      UserError: all items of a chunk failed. Completed work is kept.
    """
    log, name = kind.log(out), kind.item
    has_error = {row[name]: "error" in row for row in read_rows(log)}
    done = {item for item, error in has_error.items() if not error}
    todo = [item for item in items if item.id not in done]
    todo.sort(key=lambda item: item.id in has_error)  # first attempts before retries
    finished_ids = has_error.keys() - {item.id for item in todo}
    for file in (out, log):
        # Rows without a log line are from a chunk that was interrupted.
        filter_rows(file, lambda row: row[name] in finished_ids)
        file.touch()
    finished = len(items) - len(todo)
    with progress(kind.rows, name, len(items), initial=finished) as bar:
        for start in range(0, len(todo), CHUNK):
            chunk = todo[start : start + CHUNK]
            results = source(chunk)
            # A short last chunk may fail by chance, unless it is all the work there is.
            full = len(chunk) == CHUNK or not (done or start)
            if full and len(results.errors) == len(chunk) and not results.rows:
                raise UserError(
                    f"all of {len(chunk)} {name}s failed ({next(iter(results.errors.values()))}): "
                    "fix this and rerun the same command to resume"
                )
            # Rows before log lines: rows without a log line are generated again, the reverse would
            # be lost.
            for row in results.rows:
                append_row(out, row)
            counts = collections.Counter(row[kind.item] for row in results.rows)
            for item in chunk:
                error = {"error": results.errors[item.id]} if item.id in results.errors else {}
                append_row(log, {name: item.id, kind.rows: counts[item.id], **error})
            finished += len(chunk)
            bar.update(finished - bar.done)  # a rollout has counted its questions


def claim_output(
    out: pathlib.Path, values: Mapping[str, Any], kind: OutputKind, content: Mapping[str, str]
) -> None:
    """Writes the settings next to `out`, or checks that they are the same as before.

    `content` is that of `run.claims.content_of`.

    Raises:
      UserError: `out` was produced with other settings, from other content or by another tool, or
        it is missing although its log lists finished items.
    """
    log = kind.log(out)
    has_rows = any(True for _ in read_rows(log))
    if has_rows and not out.exists():
        raise UserError(
            f"{log} lists finished {kind.item}s, but {out} is missing: remove the log too to start "
            "over, or choose another --out"
        )
    if not log.exists() and out.exists() and out.stat().st_size:
        raise UserError(
            f"{out} was not written by this command (its log {log} is missing): choose another "
            "--out"
        )
    file = out.with_suffix(".config.json")
    save_config(file, {**values, "content": content}, renew=not has_rows, place="--out")


def failure_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the number of failed items in the rows of a log, and the last error if any."""
    errors = [row["error"] for row in rows if "error" in row]
    return {"failed": len(errors), **({"error": errors[-1]} if errors else {})}


def unique_questions(questions: Iterable[Question]) -> list[Question]:
    """Removes repeated questions: rows are stored by id, so only one of them is worked on."""
    return list({question.id: question for question in questions}.values())
