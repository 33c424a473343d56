"""The text of HTML pages by section, with the parser of the standard library."""

from __future__ import annotations

import html.parser
import re
from typing import NamedTuple

HEADINGS = frozenset(f"h{level}" for level in range(1, 7))
HIDDEN = frozenset({"script", "style", "template", "noscript", "head", "nav", "svg"})
# Elements within a line; any other one begins a new line.
INLINE = frozenset(
    "a abbr b bdi bdo cite code data dfn em i kbd mark q rp rt ruby s samp small span strong sub "
    "sup time u var wbr".split()
)


class HtmlSection(NamedTuple):
    """A heading, and the text that follows it; the heading is empty before the first."""

    heading: str
    text: str


class _Sections(html.parser.HTMLParser):
    """Collects sections; the text of hidden elements is left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: list[tuple[list[str], list[str]]] = [([], [])]
        self._hidden: list[str] = []
        self._in_heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in HIDDEN or (tag == "body" and self._hidden == ["head"]):
            # `</head>` is optional in HTML: the body ends a head without it.
            self._hidden = [] if tag == "body" else [*self._hidden, tag]
        elif tag in HEADINGS and not self._hidden:
            self.sections.append(([], []))
            self._in_heading = True
        elif tag not in INLINE:
            self.handle_data("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            # Elements that were not closed within this one end with it.
            del self._hidden[self._hidden.index(tag) :]
        elif tag in HEADINGS:
            self._in_heading = False
        elif tag not in INLINE:
            self.handle_data("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            heading, text = self.sections[-1]
            (heading if self._in_heading else text).append(data)


def _lines(parts: list[str]) -> str:
    """Joins parts of text; white space within a line is one space, empty lines are dropped."""
    # Line breaks of the source are white space, except those that elements have added alone.
    text = "".join(part if part == "\n" else re.sub(r"\s+", " ", part) for part in parts)
    return "\n".join(filter(None, (line.strip() for line in text.split("\n"))))


def html_sections(text: str) -> list[HtmlSection]:
    """Returns the sections of an HTML page, one per heading of any level."""
    parser = _Sections()
    parser.feed(text)
    parser.close()
    return [
        HtmlSection(" ".join(_lines(heading).split()), _lines(body))
        for heading, body in parser.sections
    ]
