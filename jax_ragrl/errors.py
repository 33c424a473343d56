"""Errors that a user can act on; the command line prints them as one line with exit code 2.

Messages quote what others sent. So the text of every error is without credentials, and on one line
without control characters, which a terminal would obey.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sized
from typing import Any

# Control characters (C0, DEL, C1), separators of lines, and marks that reverse the order of text.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
USER = re.compile(r"(?<=://)[^/\s?#'\"<>]*@")
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
HIDDEN = "***"
SHORTEST = 8  # characters of a secret: a shorter value is a word, such as "none"


def redacted(text: str) -> str:
    """Returns a text without the credentials of addresses and of this process.

    The latter are the values of environment variables whose names end in KEY, TOKEN, SECRET or
    PASSWORD.
    """
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value.strip()) >= SHORTEST:
            text = text.replace(value.strip(), HIDDEN)
    return USER.sub(f"{HIDDEN}@", text) if "@" in text else text


def printable(text: str) -> str:
    """Returns a text with control characters, but line ends and tabs, as `\\x1b`."""
    return CONTROLS.sub(lambda m: m[0] if m[0] in "\n\t" else _escaped(m[0]), text)


def safe_line(text: str) -> str:
    """Returns a text for an error message: one line, printable, without credentials."""
    return redacted(CONTROLS.sub(lambda m: " " if m[0] in "\n\t" else _escaped(m[0]), text))


def _escaped(character: str) -> str:
    return repr(character)[1:-1]


class SafeError(Exception):
    """An error whose text may be printed and stored."""

    def __str__(self) -> str:
        """Returns the message as `safe_line`; several messages are joined."""
        return safe_line("; ".join(map(str, self.args)))


class UserError(SafeError):
    """An input cannot be used. The message says what was given, why it fails and what to do."""


class Preempted(SafeError):  # noqa: N818 - not an error: the run can resume
    """A run stopped because it was asked to (SIGTERM). Its newest step is saved."""


class EffectError(SafeError):
    """The retriever or the frozen language model failed after its retries.

    The question is excluded from training: a failure of a server says nothing about an action.
    """


def one_each(source: object, replies: Any, requests: Sized, kind: type) -> list[Any]:
    """Returns the replies of `source`, a retriever or model of a user: one `kind` per request.

    Raises:
      UserError: they are others, or another number.
    """
    found = list(replies) if isinstance(replies, Iterable) else None
    if found is None or len(found) != len(requests):
        given = type(replies).__name__ if found is None else f"{len(found)} replies"
    elif wrong := [x for x in found if not isinstance(x, kind | EffectError)]:
        given = f"a reply of type {type(wrong[0]).__name__}"
    else:
        return found
    raise UserError(
        f"{type(source).__name__} returned {given} for {len(requests)} requests: return one "
        f"{kind.__name__} for each, in their order, or an EffectError in place of it"
    )
