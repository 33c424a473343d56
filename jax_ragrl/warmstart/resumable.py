"""Long work on many items, a portion at a time, in a file that goes on where it stood.

`ragrl demos` and `ragrl pool` ask a language model for hours, and may pay for it. What a portion
made is appended as soon as it is there. A log beside the file has a line for each item that is
done, and says which of them failed: these are tried again.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from tqdm import tqdm

from jax_ragrl.config.snapshot import settle
from jax_ragrl.errors import UserError
from jax_ragrl.runtime.jsonl import append, keep_rows, rows_of
from jax_ragrl.types import Question

CHUNK = 64  # items rolled out together, and lost together where a run is killed


class Item(Protocol):
    """Something to work on, such as a question; no two have the same `id`."""

    @property
    def id(self) -> str: ...


AnItem = TypeVar("AnItem", bound=Item)


class Made(NamedTuple):
    """Rows made of some items; and the ids of those on which something failed, and how."""

    rows: Sequence[Mapping[str, Any]]
    failed: Mapping[str, str]


class Kind(NamedTuple):
    """What an item is called, which is the key of its id in every row, and what is made of it."""

    item: str
    made: str

    def log(self, out: pathlib.Path) -> pathlib.Path:
        """The file beside `out` with a line an item: how many rows it gave, and its error if any.

        An item that failed may have given some all the same, on other branches.
        """
        return out.with_suffix(f".{self.item}s.jsonl")


def gather(
    source: Callable[[Sequence[AnItem]], Made],
    items: Sequence[AnItem],
    out: pathlib.Path,
    kind: Kind,
) -> None:
    """Appends to `out` what a source makes of the items that are not done yet.

    Raises `UserError` where nothing comes back any more: what is done is kept.
    """
    log, name = kind.log(out), kind.item
    tried = {row[name]: "error" in row for row in rows_of(log)}
    done = {item for item, failed in tried.items() if not failed}
    todo = [item for item in items if item.id not in done]
    todo.sort(key=lambda item: item.id in tried)  # what failed waits for its second try
    kept = tried.keys() - {item.id for item in todo}
    for file in (out, log):
        keep_rows(file, lambda row: row[name] in kept)
        file.touch()
    bar = tqdm(total=len(items), initial=len(items) - len(todo), unit=name)
    with bar:
        for start in range(0, len(todo), CHUNK):
            chunk = todo[start : start + CHUNK]
            made = source(chunk)
            whole = len(chunk) == CHUNK or not (done or start)
            if whole and len(made.failed) == len(chunk) and not made.rows:
                raise UserError(
                    f"all of {len(chunk)} {name}s failed ({next(iter(made.failed.values()))}): "
                    "put that right, then the same command goes on from here"
                )
            for row in made.rows:
                append(out, row)
            for row in _told(chunk, made, kind):
                append(log, row)
            bar.update(len(chunk))


def _told(items: Sequence[Item], made: Made, kind: Kind) -> Iterator[dict[str, Any]]:
    counts = collections.Counter(row[kind.item] for row in made.rows)
    for item in items:
        error = {"error": made.failed[item.id]} if item.id in made.failed else {}
        yield {kind.item: item.id, kind.made: counts[item.id], **error}


def begin(out: pathlib.Path, values: Mapping[str, Any], kind: Kind) -> None:
    """Notes beside `out` what it is made with.

    Raises `UserError` where something in it was made with anything else, or by anything else, and
    where what its log tells of is gone.
    """
    log = kind.log(out)
    made = any(True for _ in rows_of(log))
    if made and not out.exists():
        raise UserError(
            f"{log} says what is done, but {out} is gone: remove that file too to begin anew, or "
            "name another --out"
        )
    if not log.exists() and out.exists() and out.stat().st_size:
        raise UserError(
            f"{out} holds something else ({log}, which tells what is done, is missing): name "
            "another --out"
        )
    settle(out.with_suffix(".config.json"), values, renew=not made, place="--out")


def failures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the rows of a log: how many items failed, and what the last one did of."""
    errors = [row["error"] for row in rows if "error" in row]
    return {"failed": len(errors), **({"error": errors[-1]} if errors else {})}


def distinct(questions: Iterable[Question]) -> list[Question]:
    """Questions, each once; what is made is kept by their ids, so that no two may share one."""
    known: dict[str, Question] = {}
    for question in questions:
        if known.setdefault(question.id, question).text != question.text:
            raise UserError(
                f"training questions share the id {question.id!r}, and only one would be written "
                "about: give each an id of its own, or, where several sets were put together, all "
                "their files (--config.data.files.train=A,B), which does"
            )
    return list(known.values())
