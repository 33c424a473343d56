"""Prompt templates: data files beside this one, `$name` where a value goes.

A style is a folder in `prompts/`; a name with a slash in it is the path of another, `./mine`.
A value is inserted once and never scanned again, so text that holds `$question` stays as it is.
"""

from __future__ import annotations

import functools
import importlib.resources
import pathlib
import re
import string
from collections.abc import Sequence
from importlib.resources.abc import Traversable

from jax_ragrl.errors import UserError
from jax_ragrl.types import Message, Passage


def _folder(style: str) -> Traversable:
    """The folder of a style."""
    if "/" in style:
        return pathlib.Path(style)
    return importlib.resources.files("jax_ragrl.text") / "prompts" / style


@functools.cache
def template(style: str, name: str) -> string.Template:
    """The template `<name>.txt` of a style."""
    file = _folder(style) / f"{name}.txt"
    if not file.is_file():
        raise UserError(f"no prompt {name!r} in style {style!r}: there is no file {file}")
    return string.Template(file.read_text(encoding="utf-8").rstrip("\n"))


def user_turn(style: str, name: str, **values: str) -> tuple[Message, ...]:
    """A conversation of one user message; a style with a `system.txt` opens with it."""
    message = Message("user", template(style, name).substitute(values))
    if not (_folder(style) / "system.txt").is_file():
        return (message,)
    return Message("system", template(style, "system").substitute()), message


def numbered(
    style: str, passages: Sequence[Passage], *, first: int = 1, form: str = "document"
) -> str:
    """Documents as a style's `document.txt` (or another `form`) shows them, from number `first`."""
    line = template(style, form)
    lines = (
        line.substitute(number=i, title=p.title, text=p.text) for i, p in enumerate(passages, first)
    )
    return separator(style).join(lines)


def separator(style: str) -> str:
    """What stands between two documents: a blank line, or a line break in compact styles."""
    return "\n" if style.endswith("_tiny") else "\n\n"


def read_numbered(style: str, prompt: str, *, form: str = "document") -> list[tuple[str, str]]:
    """The (title, text) pairs that `numbered` wrote into a prompt, in order."""
    return _pattern(style, form).findall(prompt)


@functools.cache
def _pattern(style: str, form: str) -> re.Pattern[str]:
    line = re.escape(template(style, form).template)
    for name, group in (("number", r"\d+"), ("title", "(.*?)"), ("text", "(.*)")):
        line = line.replace(re.escape(f"${name}"), group)
    return re.compile(f"^{line}$", re.MULTILINE)
