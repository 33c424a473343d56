"""The one reader of JSON that other programs wrote: total, whatever the text holds.

Python's parser raises `RecursionError` for deep nesting, and its strings may hold half a surrogate
pair, which neither UTF-8 nor a tokenizer accepts.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from jax_ragrl.errors import UserError

MAX_FILE = 256 << 20  # bytes of a description; the largest are tokenizers, of some 30 MB
MAX_DEPTH = 100  # levels; records and replies have fewer than ten
# One half of a surrogate pair: Python's JSON parser joins complete pairs, so only single halves
# match.
HALF = re.compile("[\ud800-\udfff]")


def loads(text: str | bytes) -> Any:
    """Parses JSON; half a surrogate pair is replaced by U+FFFD.

    Texts that were truncated within a character contain such halves.

    Raises:
      ValueError: bytes that are not UTF-8, malformed JSON (`json.JSONDecodeError`), more than
        `MAX_DEPTH` levels, or an integer of more than 4,300 digits.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} levels")
    if "\\ud" not in text and "\\uD" not in text:  # most texts have no surrogates
        return value
    return json.loads(HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))


def loads_or_none(text: str | bytes) -> Any:
    """Parses JSON; None for a text that `loads` refuses."""
    try:
        return loads(text)
    except ValueError:
        return None


def read_object(file: pathlib.Path, remedy: str) -> dict[str, Any]:
    """Reads a file that holds one JSON object, such as a config or the description of an index.

    Args:
      file: the file, which must exist.
      remedy: for the error message.

    Raises:
      UserError: the file is damaged, or holds another value.
    """
    try:
        if file.stat().st_size > MAX_FILE:
            raise ValueError(f"larger than {MAX_FILE} bytes")
        value = loads(file.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, and no object")
    except (ValueError, OSError) as error:
        raise UserError(f"{file} is damaged ({error}): {remedy}") from error
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more levels; without recursion."""
    containers = [value]
    for _ in range(levels):
        children = (x.values() if isinstance(x, dict) else x for x in containers)
        containers = [y for own in children for y in own if isinstance(y, dict | list)]
        if not containers:
            return False
    return True
