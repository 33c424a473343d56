"""Hits as text for a terminal: the part of a passage with the words of the query, marked."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

from jax_ragrl.text.words import WORD
from jax_ragrl.types import Hits

WIDTH = 240  # characters of a snippet, about
# English words that nearly every passage has: marking them would hide the others.
COMMON = frozenset(
    """a an and are as at be been by did do does for from had has have he her his how in is it its
    of on or she that the their they this to was were what when where which who whom whose why will
    with""".split()
)


class Marks(NamedTuple):
    """The texts before and after a matched word."""

    start: str
    end: str


PLAIN = Marks("**", "**")
BOLD = Marks("\x1b[1m", "\x1b[0m")  # ANSI, for terminals


def clean(text: str) -> str:
    """Returns a text on one line without control characters, which a terminal would obey."""
    line = " ".join(text.split())
    kinds = ((c, unicodedata.category(c)) for c in line)
    # C: control, format, surrogate, private and unassigned characters.
    return "".join(c for c, kind in kinds if not kind.startswith("C"))


def query_words(query: str) -> frozenset[str]:
    """Returns the words of a query to mark, without common ones unless there are no others."""
    words = frozenset(WORD.findall(query.lower()))
    return words - COMMON or words


def snippet(text: str, query: str, marks: Marks = PLAIN, width: int = WIDTH) -> str:
    """Returns about `width` characters with the most distinct words of the query, marked."""
    text = clean(text)
    words = query_words(query)
    matches = [m for m in WORD.finditer(text) if m[0].lower() in words]
    start = _start(text, [(m.start(), m[0].lower()) for m in matches], width)
    end = min(start + width, len(text))
    # The end of the last whole word, if there is a space not far before.
    if end < len(text) and (space := text.rfind(" ", 0, end)) > end - WIDTH // 4:
        end = space
    parts = ["…" if start else ""]
    at = start
    for match in matches:
        if start <= match.start() and match.end() <= end:
            # Neighboring characters of a script without blanks have marks around all of them.
            if at == match.start() and len(parts) > 1:
                parts[-1:] = [match[0], marks.end]
            else:
                parts += [text[at : match.start()], marks.start, match[0], marks.end]
            at = match.end()
    return "".join([*parts, text[at:end], "…" if end < len(text) else ""])


def _start(text: str, matches: list[tuple[int, str]], width: int) -> int:
    if len(text) <= width:
        return 0

    def distinct(at: int) -> int:
        return len({word for place, word in matches if at <= place < at + width})

    # A window may begin at the text's start or a little before a match, to show what precedes it.
    starts = [0, *(max(0, place - width // 6) for place, _ in matches)]
    best = max(starts, key=distinct)
    return text.rfind(" ", 0, best) + 1 if best else 0


def lines(hits: Hits, query: str, marks: Marks = PLAIN) -> Iterator[str]:
    """Yields two lines per hit: rank, score, id and title; and the snippet."""
    pairs = zip(hits.passages, hits.scores, strict=True)
    for rank, (passage, score) in enumerate(pairs, start=1):
        title = snippet(passage.title, query, marks, len(passage.title))
        yield f"{rank:3}  {score:8.4f}  {clean(passage.id)}  {title}".rstrip()
        yield f"     {snippet(passage.text, query, marks)}".rstrip()
