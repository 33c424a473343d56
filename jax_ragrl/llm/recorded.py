"""Recorded replies: a file with which anybody repeats a run of a large frozen model, offline.

The file is JSON lines, compressed by xz if its name ends in `.xz`. The first line describes the
replies. Each further one is a reply: the key of its request, the text, and the numbers of prompt
and completion tokens, null if the server reported none. The keys are hashes and in order, so that
the file holds no prompt, and equal replies give equal bytes.
"""

from __future__ import annotations

import json
import lzma
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from jax_ragrl.corpus.formats.files import open_text
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.llm.cache import read_cache
from jax_ragrl.runtime.caches import draft_file

FORMAT = "ragrl replies 1"
KEY_BYTES = 12  # of the cache's key: two of a million requests share it with probability 1e-17
REMEDY = "restore the file, or delete it and make it again with 'ragrl replies'"

Row: TypeAlias = tuple[str, int | None, int | None]


class RecordedReplies(NamedTuple):
    """The replies of a file.

    `rows` has text, prompt tokens and completion tokens, by the first bytes of
    `llm.cache.request_key` in hexadecimal digits; `settings` is JSON of the models and the
    sampling.
    """

    rows: dict[str, Row]
    settings: set[str]

    def get(self, key: bytes) -> str | None:
        """Returns the reply to a request, with its token counts if it has them, or None."""
        text, prompt_tokens, completion_tokens = self.rows.get(_short(key), (None, None, None))
        if text is None or prompt_tokens is None or completion_tokens is None:
            return text
        return MeteredReply(text, prompt_tokens, completion_tokens)

    def __str__(self) -> str:
        models = sorted({str(loads(text).get("model")) for text in self.settings})
        what = "1 reply" if len(self.rows) == 1 else f"{len(self.rows)} replies"
        return f"{what} of {', '.join(models) or 'no model'}"


def read_replies(file: pathlib.Path) -> RecordedReplies:
    """Reads the file that `record_replies` wrote.

    Raises:
      UserError: the file is missing, damaged or of another kind, or has two different replies to
        one request.
    """
    rows: dict[str, Row] = {}
    try:
        with open_text(file, whole=True) as lines:
            head, *values = map(loads, lines)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ValueError(f"its first line is not of the format {FORMAT!r}")
        for number, (key, text, *counts) in enumerate(values, start=2):
            types = [type(value) for value in (key, text, *counts)]
            if types not in ([str, str, int, int], [str, str, type(None), type(None)]):
                raise ValueError(f"line {number} is not a key, a text and two numbers")
            row: Row = (text, counts[0], counts[1])
            if rows.setdefault(key, row) != row:
                raise ValueError(f"line {number} is another reply to the request {key}")
        if len(rows) != head.get("replies"):
            raise ValueError(f"it has {len(rows)} of {head.get('replies')} replies")
        for each in head["settings"]:
            if not isinstance(each, dict):
                raise ValueError(f"{each!r} is no settings of a model")
        return RecordedReplies(rows, {_compact(each) for each in head["settings"]})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} holds no recorded replies ({error}): {REMEDY}") from error


def record_replies(caches: Sequence[pathlib.Path], out: pathlib.Path) -> str:
    """Adds the replies of caches to a file, atomically, and returns a summary.

    The first of several replies to one request stays, that of an existing file before all: runs
    that are repeated with the file get the same reply. Runs of the caches may have been killed.

    Raises:
      UserError: a cache or the existing file cannot be read.
    """
    old = read_replies(out) if out.exists() else RecordedReplies({}, set())
    new, unequal = RecordedReplies(dict(old.rows), set(old.settings)), 0
    for cache in caches:
        found, settings = read_cache(cache)
        new.settings.update(_compact(loads(text)) for text in settings)
        for key, text, *counts in found:
            unequal += new.rows.setdefault(_short(key), (text, *counts))[0] != text
    head = {
        "format": FORMAT,
        "replies": len(new.rows),
        "settings": [loads(text) for text in sorted(new.settings)],
    }
    lines = [_compact(head), *(_compact([key, *new.rows[key]]) for key in sorted(new.rows))]
    data = "".join(f"{line}\n" for line in lines).encode()
    data = lzma.compress(data) if out.suffix == ".xz" else data
    with draft_file(out) as draft:
        draft.write_bytes(data)
    note = f"; left out for an earlier reply to the same request: {unequal}" if unequal else ""
    return f"{out}: {new}, {len(new.rows) - len(old.rows)} new, {len(data):,} bytes{note}"


def _short(key: bytes) -> str:
    return key[:KEY_BYTES].hex()


def _compact(value: Any) -> str:
    # ASCII alone, because half a surrogate pair has no bytes in UTF-8.
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
