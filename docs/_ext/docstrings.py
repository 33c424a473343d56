"""Docstrings as reStructuredText: an indented block of text (a formula, a drawing) is literal."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Fields|Attributes|Example|Note)s?:$")

CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")


def indent(line: str) -> int:
    """The number of spaces that a line begins with."""
    return len(line) - len(line.lstrip())


def literal_blocks(lines: list[str]) -> list[str]:
    """Marks each indented paragraph outside of sections with `::`."""
    result: list[str] = []
    in_section = in_block = False
    for line in lines:
        flush = bool(line.strip()) and indent(line) == 0
        if flush:
            if in_block:
                result.append("")
            in_section, in_block = bool(SECTION.match(line)), False
        elif line.strip() and not in_section and not in_block:
            result += ["", "::", ""]
            in_block = True
        result.append(line)
    return result


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrites a docstring in place, before napoleon reads its sections."""
    lines[:] = literal_blocks(CODE.sub(literal, "\n".join(lines)).split("\n"))


def literal(match: re.Match[str]) -> str:
    """Code as reStructuredText writes it, also directly before a letter (`Turn`s)."""
    return f"``{match[1]}``" + ("\\ " if match[2] else "") + match[2]


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the handler, with a priority before napoleon's 500."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
