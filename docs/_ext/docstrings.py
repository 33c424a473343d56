"""Docstrings as reStructuredText: an indented block of text (a formula, a drawing) is literal."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import pkgutil
import re
from typing import Any

from sphinx.application import Sphinx

SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Fields|Attributes|Example|Note)s?:$")

DEPARTURES = re.compile(r"^(?=Departures?\b)", re.MULTILINE)
DEEPEST = 4  # spaces before the second line of an entry of a section
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")


def indent(line: str) -> int:
    """The number of spaces that a line begins with."""
    return len(line) - len(line.lstrip())


def literal_blocks(lines: list[str]) -> list[str]:
    """Marks each indented paragraph outside of sections with `::`; levels the lines of entries."""
    result: list[str] = []
    in_section = in_block = False
    for line in lines:
        if in_section and indent(line) > DEEPEST:
            line = " " * DEEPEST + line.strip()  # reST takes deeper lines for a quotation
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


def modules_of(name: str) -> list[str]:
    """A module, and if it is a package its modules `recipe` and `system`."""
    below = pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", ()))
    names = {module.name for module in below}
    return [name, *(f"{name}.{part}" for part in ("recipe", "system") if part in names)]


def departures(module: str) -> str:
    """The departures that the docstring of a system's module lists, as Markdown."""
    texts = (inspect.getdoc(importlib.import_module(name)) or "" for name in modules_of(module))
    text = next(text for text in texts if DEPARTURES.search(text))
    lines = text[DEPARTURES.search(text).start() :].splitlines()
    result, before = list[str](), ""
    for line in lines[1:] if lines[0].count(" ") < 8 else lines:
        flush = not line.startswith(" ")
        if flush and before.startswith(" "):
            result.append("")  # a paragraph after the list
        result.append(re.sub(r"^  (\d+\.) ", r"\1 ", line) if not flush else line)
        before = line
    return "\n".join(re.sub(r"^     ", "   ", line) for line in result) + "\n"


def config_file(name: str) -> str:
    """The docstring of a file of configs/, as text."""
    file = pathlib.Path(__file__).parents[2] / "configs" / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return f"```text\n{text}\n```\n"


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrites a docstring in place, before napoleon reads its sections."""
    lines[:] = literal_blocks(CODE.sub(literal, "\n".join(lines)).split("\n"))


def literal(match: re.Match[str]) -> str:
    """Code as reStructuredText writes it, also directly before a letter (`Turn`s)."""
    return f"``{match[1]}``" + ("\\ " if match[2] else "") + match[2]


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leaves out the fields of a `NamedTuple`: their docstring is "Alias for field number 0"."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the handler, with a priority before napoleon's 500."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
