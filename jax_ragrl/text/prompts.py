"""Prompt templates: text files in which `$name` is a placeholder.

A style is a folder in `prompts/`; a style with a slash is the path of another folder, such as
`./mine`. Inserted values are never scanned again, so that a passage which contains `$question` is
not changed.
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
from jax_ragrl.types import Message, Passage, Question


def _folder(style: str) -> Traversable:
    if "/" in style:
        return pathlib.Path(style)
    return importlib.resources.files("jax_ragrl.text") / "prompts" / style


@functools.cache
def template(style: str, name: str) -> string.Template:
    """Returns the template `<name>.txt` of a style; `UserError` if it is missing or empty."""
    file = _folder(style) / f"{name}.txt"
    if not file.is_file():
        raise UserError(
            f"no prompt {name!r} in style {style!r}: create {file}, or use another style"
        )
    try:
        # Editors end a file with a line break, and some begin it with a mark of its encoding; they
        # are not part of the prompt.
        text = file.read_text(encoding="utf-8-sig").rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt {file} is not UTF-8 ({error.reason}): convert it") from error
    if not text.strip():
        raise UserError(f"prompt {file} is empty: write the prompt into it")
    return string.Template(text)


def fill(style: str, name: str, /, **values: object) -> str:
    """Returns a template with its placeholders filled; `UserError` if it has others, or none."""
    source = template(style, name)
    try:
        if values and "$" not in source.template:
            raise ValueError("it has no placeholder")
        return source.substitute(values)
    except (KeyError, ValueError) as error:
        names = ", ".join(f"${key}" for key in values) or "no placeholder"
        raise UserError(
            f"prompt {_folder(style) / name}.txt cannot be filled ({error}): it may have {names}, "
            "and $$ for a dollar sign"
        ) from error


def user_turn(style: str, name: str, **values: str) -> tuple[Message, ...]:
    """Returns a conversation of one user message, after the style's `system.txt` if it has one."""
    return (*_system(style), Message("user", fill(style, name, **values)))


def question_turn(
    style: str,
    name: str,
    question: Question,
    passages: Sequence[Passage] = (),
    *,
    first: int = 1,
    **values: str,
) -> tuple[Message, ...]:
    """Returns a `user_turn` with a question and passages, numbered from `first`."""
    documents = format_passages(style, passages, first=first)
    return user_turn(style, name, question=question.text, documents=documents, **values)


def conversations(style: str) -> dict[str, tuple[Message, ...]]:
    """Returns the conversation of each template of a style, with its placeholders as they are."""
    folder = _folder(style)
    if not folder.is_dir():
        raise UserError(f"no prompts of style {style!r}: create {folder}, or use another style")
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".txt"))
    names = [name for file in files if (name := file.removesuffix(".txt")) != "system"]
    prompts = {name: Message("user", template(style, name).template) for name in names}
    return {name: (*_system(style), message) for name, message in prompts.items()}


@functools.cache  # systems write prompts far more often than an operating system should be asked
def _system(style: str) -> tuple[Message, ...]:
    # Optional: most styles have all instructions in the user message.
    if not (_folder(style) / "system.txt").is_file():
        return ()
    return (Message("system", fill(style, "system")),)


def format_passages(
    style: str, passages: Sequence[Passage], *, first: int = 1, form: str = "document"
) -> str:
    """Formats passages as a numbered list, each by the template `form`."""
    lines = (
        fill(style, form, number=i, title=p.title, text=p.text)
        for i, p in enumerate(passages, first)
    )
    return separator(style).join(lines)


def separator(style: str) -> str:
    """Returns the text between two passages: a blank line, or a line break in compact styles."""
    return "\n" if style.endswith("_tiny") else "\n\n"


def parse_passages(style: str, prompt: str, *, form: str = "document") -> list[tuple[str, str]]:
    """Returns the (title, text) pairs that `format_passages` wrote into a prompt, in order."""
    # The template is its own grammar: each placeholder becomes a group of the pattern.
    marks = {"number": ("\0", r"\d+"), "title": ("\1", "(.*?)"), "text": ("\2", "(.*)")}
    line = re.escape(fill(style, form, **{name: mark for name, (mark, _) in marks.items()}))
    for mark, group in marks.values():
        line = line.replace(mark, group)
    return re.findall(f"^{line}$", prompt, re.MULTILINE)
