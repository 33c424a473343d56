"""The text of HTML pages by section, in one pass over the page.

Tags, comments and declarations end as in the HTML standard (section 13.2.5). `html.parser` raises
for `<![x[`, and its time is quadratic in unclosed comments and tags.
"""

from __future__ import annotations

import html
import re
from typing import NamedTuple

HEADINGS = frozenset(f"h{level}" for level in range(1, 7))
HIDDEN = frozenset({"script", "style", "template", "noscript", "head", "nav", "svg"})
# Elements within a line; any other one begins a new line.
INLINE = frozenset(
    "a abbr b bdi bdo cite code data dfn em i kbd mark q rp rt ruby s samp small span strong sub "
    "sup time u var wbr".split()
)
# What begins with `<`. The repetitions are possessive and every alternative also ends with the
# page, so that none is tried twice from the same place.
MARKUP = re.compile(
    r"""<(?:
      !--(?:-?>|(?s:.*?)(?:--!?>|\Z))                    # a comment
    | (?:[!?]|/(?![a-zA-Z]))[^>]*+>?                     # a declaration
    | (?P<end>/?)(?P<name>[a-zA-Z][^\s/>]*+)             # a tag
      (?: [\s/]++
        | [^\s/>][^\s/>=]*+                              # the name of an attribute, and its value
          (?:\s*+=\s*+(?:"[^"]*+"?|'[^']*+'?|[^\s>]*+))?+
      )*+(?P<closed>>?)
    )""",
    re.VERBOSE,
)
# Elements that hold text alone, in which `<` begins no other tag than their own end.
TEXT_ENDS = {
    name: re.compile(rf"</{name}(?=[\s/>])|\Z", re.IGNORECASE) for name in ("script", "style")
}
# A number of a character too long to be one, which `html.unescape` would refuse to read.
LONG_NUMBER = re.compile(r"&#[0-9]{99,}+;?")


class Section(NamedTuple):
    """A part of a document."""

    heading: str  # empty for the text before the first heading
    text: str  # without the heading
    place: str = ""  # `page=3` in a PDF; empty: the heading names the place


class _Sections:
    """Collects sections; the text of hidden elements is left out."""

    def __init__(self) -> None:
        self.sections: list[tuple[list[str], list[str]]] = [([], [])]
        self._hidden: list[str] = []
        self._in_heading = False

    def start(self, tag: str) -> None:
        if tag in HIDDEN or (tag == "body" and self._hidden == ["head"]):
            # `</head>` is optional in HTML: the body ends a head without it.
            if tag == "body":
                self._hidden = []
            elif tag not in self._hidden:
                self._hidden.append(tag)
        elif tag in HEADINGS and not self._hidden:
            self.sections.append(([], []))
            self._in_heading = True
        elif tag not in INLINE:
            self.add("\n")

    def end(self, tag: str) -> None:
        if tag in self._hidden:
            # Elements that were not closed within this one end with it.
            del self._hidden[self._hidden.index(tag) :]
        elif tag in HEADINGS:
            self._in_heading = False
        elif tag not in INLINE:
            self.add("\n")

    def add(self, text: str) -> None:
        if not self._hidden:
            heading, body = self.sections[-1]
            (heading if self._in_heading else body).append(text)


def _lines(parts: list[str]) -> str:
    """Joins parts of text; white space within a line is one space, empty lines are dropped."""
    # Line breaks of the source are white space, except those that elements have added alone.
    text = "".join(part if part == "\n" else re.sub(r"\s+", " ", part) for part in parts)
    return "\n".join(filter(None, (line.strip() for line in text.split("\n"))))


def html_sections(text: str) -> list[Section]:
    """Returns the sections of an HTML page, one per heading of any level."""
    sections, position = _Sections(), 0
    while position < len(text):
        match = MARKUP.search(text, position)
        start = match.start() if match else len(text)
        sections.add(_unescaped(text[position:start]))
        position = match.end() if match else len(text)
        if not match or not match["name"]:
            continue
        if not match["closed"]:
            sections.add(_unescaped(match[0]))  # the page ends in it: perhaps it is no tag
            continue
        tag, closes_itself = match["name"].lower(), match[0].endswith("/>")
        if not match["end"]:
            sections.start(tag)
        if match["end"] or closes_itself:
            sections.end(tag)
        elif tag in TEXT_ENDS:
            end = TEXT_ENDS[tag].search(text, position)
            assert end is not None  # the end of the page is one
            sections.add(_unescaped(text[position : end.start()]))
            position = end.start()
    return [
        Section(" ".join(_lines(heading).split()), _lines(body))
        for heading, body in sections.sections
    ]


def _unescaped(text: str) -> str:
    return html.unescape(LONG_NUMBER.sub("\ufffd", text))
