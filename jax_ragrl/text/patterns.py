"""Parts of regular expressions for actions, in the syntax that `re` and Rust's `regex` share.

`enclosed` reads what such parts write between two marks.

Parsers strip blanks and cut at line breaks, so a part that must not be empty begins with a visible
character, and no part has control characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

CONTROL = r"\x00-\x1f\x7f"  # a line break is one of them


def character(without: str = "") -> str:
    """Returns a pattern of one character that is neither a control character nor in `without`."""
    return f"[^{CONTROL}{_escaped(without)}]"


def visible(without: str = "") -> str:
    """Returns a pattern of one `character` that is not blank."""
    return rf"[^\s{CONTROL}{_escaped(without)}]"


def line(without: str = "", first: str = "") -> str:
    """Returns a pattern of a line that begins with a visible character, `without` some others."""
    return f"{visible(without + first)}{character(without)}*"


def lines(without: str = "") -> str:
    """Returns a pattern of one or more lines of text, without the characters in `without`."""
    return rf"{visible(without)}(?:\n|{character(without)})*"


def enclosed(
    text: str, opening: re.Pattern[str], closing_of: Callable[[re.Match[str]], re.Pattern[str]]
) -> Iterator[tuple[re.Match[str], str]]:
    """Yields openings, and the text of each one up to its closing, from left to right.

    An opening without a closing is skipped. A single pattern with `.*?` would search the rest of
    the text again for each of many such openings.
    """
    start, absent = 0, set()
    while match := opening.search(text, start):
        start, closing = match.end(), closing_of(match)
        if closing in absent:
            continue
        if end := closing.search(text, start):
            yield match, text[start : end.start()]
            start = end.end()
        else:
            absent.add(closing)


def choice(*patterns: str) -> str:
    """Returns a pattern of one of several patterns."""
    return f"(?:{'|'.join(patterns)})"


def ascending(items: Sequence[str], separator: str) -> str:
    """Returns a pattern of one or more of some texts, each at most once, in their order.

    In any order, an automaton would have to remember which items it has seen: 2^n states. In this
    order it remembers the last one.
    """
    quoted = [re.escape(item) for item in items]
    rests = ["".join(f"(?:{separator}{q})?" for q in quoted[i + 1 :]) for i in range(len(quoted))]
    return choice(*(first + rest for first, rest in zip(quoted, rests, strict=True)))


def between(tag: str, content: str) -> str:
    """Returns a pattern of some content between a tag and its closing tag."""
    return f"<{tag}>{content}</{tag}>"


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in r"\]^-[&~" else c for c in text)
