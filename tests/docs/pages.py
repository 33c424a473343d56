"""The fenced blocks of README.md, CONTRIBUTING.md, AGENTS.md and docs/, with their markers.

A marker is an HTML comment on the line directly above a block:

    <!-- run -->               a bash block that a slow test runs
    <!-- not run: REASON -->   a block that no test runs; commands of `ragrl` are still checked
    <!-- slow: REASON -->      a Python block that only a slow test executes
    <!-- file: NAME.py -->     a Python block that the bash blocks of its page find as a file

Python blocks are executed; the blocks of a page share a namespace, in order.
"""

import itertools
import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- (?P<marker>[^\n]*?) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
ENDS = ("&&", "||", "|", ";")
ASSIGNED = re.compile(r"\w+=.*")  # a variable before a command
PYTHON, SHELL = ("python",), ("bash", "console", "sh", "shell")


class Block(NamedTuple):
    """A fenced block.

    Fields:
      file: the page, relative to the repository.
      line: the line of the opening fence.
      language: the word after the fence.
      text: the lines between the fences.
      marker: the comment above it; empty if there is none.
    """

    file: str
    line: int
    language: str
    text: str
    marker: str

    @property
    def name(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"


def pages() -> list[pathlib.Path]:
    """Every page that a reader may copy from."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
    docs = (file for file in (ROOT / "docs").rglob("*.md") if "_build" not in file.parts)
    return [file for file in [*top, *sorted(docs)] if file.exists()]


def blocks(file: pathlib.Path, languages: tuple[str, ...]) -> Iterator[Block]:
    """The blocks of a page in some languages."""
    text = file.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match["language"] in languages:
            line = text[: match.start("fence")].count("\n") + 1
            name = str(file.relative_to(ROOT))
            yield Block(name, line, match["language"], match["text"], match["marker"] or "")


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words: lines joined, comments, prompts and pipes removed."""
    result = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = re.sub(r"^\$ ", "", line.strip())
        words = shlex.split(line, comments=True)
        for ends, part in itertools.groupby(words, key=lambda word: word in ENDS):
            command = list(itertools.dropwhile(ASSIGNED.fullmatch, part))
            if command and not ends:
                result.append(command)
    return result
