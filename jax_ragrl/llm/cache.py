"""Replies of a language model on disk: a repeated evaluation or a resumed run pays nothing twice.

The file is an SQLite database with a write-ahead log (sqlite.org/wal.html), which several processes
of one machine may write, and which a killed process leaves intact: each reply is stored when it
arrives.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import pathlib
import sqlite3
import sys
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeVar

from jax_ragrl.errors import UserError, redacted
from jax_ragrl.json_text import loads
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.runtime.servers import COUNTS

T = TypeVar("T")
FILE = "llm_cache.sqlite"
WAIT = 60.0  # seconds for the lock of another writer, which holds it for milliseconds
REPLIES = """
CREATE TABLE IF NOT EXISTS replies (
  key BLOB PRIMARY KEY, reply TEXT NOT NULL, prompt_tokens INTEGER, completion_tokens INTEGER
) WITHOUT ROWID
"""
# Without the keys of their requests: they say what the file is, and no reply is found by them.
SETTINGS = "CREATE TABLE IF NOT EXISTS settings (settings TEXT PRIMARY KEY) WITHOUT ROWID"
ROWS = ((bytes, str, int, int), (bytes, str, NoneType, NoneType))  # types of a reply


class ReplyCache:
    """Replies by the request that they answer.

    Args:
      file: the database, which is created with the first reply. A folder that cannot be written,
        such as that of a finished run on a read-only disk, has no cache.
    """

    def __init__(self, file: pathlib.Path) -> None:
        self._file = file
        self._connection: sqlite3.Connection | None = None

    def get(self, key: bytes) -> str | None:
        """Returns a stored reply, with its token counts if it has them; None if there is none."""
        query = "SELECT reply, prompt_tokens, completion_tokens FROM replies WHERE key = ?"
        row = self._use(lambda database: database.execute(query, (key,)).fetchone())
        if row is None:
            return None
        count_hit(self._file.name)
        return str(row[0]) if row[1] is None else MeteredReply(*row)

    def put(self, key: bytes, reply: str, body: Mapping[str, Any]) -> None:
        """Stores a reply; of concurrent replies to one request the first remains.

        Of the `body` of the request the model and the sampling parameters are stored.
        """
        counts: tuple[int | None, int | None] = (None, None)
        if isinstance(reply, MeteredReply):
            counts = reply.prompt_tokens, reply.completion_tokens
        row = (key, str(reply), *counts)
        self._use(lambda db: db.execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?)", row))
        fields = {name: x for name, x in body.items() if name not in ("messages", "seed")}
        text = redacted(json.dumps(fields, sort_keys=True))  # it will be published
        self._use(lambda db: db.execute("INSERT OR IGNORE INTO settings VALUES (?)", (text,)))

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        if self._connection is None and not os.access(self._file.parent, os.W_OK):
            return None
        try:
            self._connection = self._connection or _open(self._file)
            return work(self._connection)
        except sqlite3.Error as error:
            raise UserError(
                f"{self._file}: the cache of replies cannot be used ({error}): if the disk is full "
                "or the file locked, mend that; otherwise move the file away, which holds replies "
                "that may have cost money, or set llm.cache (or judge.cache) to False"
            ) from error


def _open(file: pathlib.Path) -> sqlite3.Connection:
    # Every statement is one transaction. Callers share one thread, not the one that opens.
    database = sqlite3.connect(file, WAIT, isolation_level=None, check_same_thread=False)
    # The log is not flushed to the disk per reply: a power failure may cost the last replies, but
    # neither a failure nor a kill damages the file.
    for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", REPLIES, SETTINGS):
        database.execute(statement)
    return database


def read_cache(file: pathlib.Path) -> tuple[list[tuple[Any, ...]], set[str]]:
    """Returns key, text, prompt and completion tokens of each reply, and all settings as JSON."""
    try:
        address = f"{file.absolute().as_uri()}?mode=ro"  # a wrong name creates no file
        with contextlib.closing(sqlite3.connect(address, WAIT, uri=True)) as database:
            settings = {text for (text,) in database.execute("SELECT settings FROM settings")}
            rows = database.execute("SELECT * FROM replies ORDER BY key").fetchall()
        if not all(tuple(map(type, row)) in ROWS for row in rows):
            raise ValueError("a row is not a key, a text and two numbers")
        if not all(isinstance(loads(text), dict) for text in settings):
            raise ValueError("the settings of a model are no object")
        return rows, settings
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: no replies can be read ({error}): give the {FILE} of a run or of a table, in "
            "a folder that can be written"
        ) from error


_HITS = collections.Counter[str]()  # replies of this process from files, by the name of the file


def count_hit(file: str) -> None:
    """Counts a reply that no server gave."""
    COUNTS["llm_cache_hits"] += 1
    _HITS[file] += 1


def print_hits() -> None:
    """Prints how many replies came from files: else nothing would show that a server is away."""
    for file, count in _HITS.items():
        what = "1 reply" if count == 1 else f"{count} replies"
        print(f"ragrl: {what} of language models came from {file}, not a server", file=sys.stderr)
    _HITS.clear()


def request_key(body: Mapping[str, Any], seed: int) -> bytes:
    """Returns the key of a request, its body and its seed (see `llm.base.seed_of`).

    The seed names the question, the path and the sample. It counts even if the server gets no seed:
    several samples of one prompt must remain several.
    """
    text = json.dumps([body, seed], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()
