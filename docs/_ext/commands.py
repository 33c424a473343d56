"""Every command of `ragrl`, read from its parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator


def parser() -> argparse.ArgumentParser:
    """The parser of `ragrl`."""
    from jax_ragrl.cli.main import _parser

    return _parser()[0]


def commands(
    parser: argparse.ArgumentParser, name: str = "ragrl"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command with its parser, sub-commands after their command."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                yield from commands(sub, f"{name} {word}")


def markdown() -> str:
    """One heading per command, one entry per option."""
    return "\n".join(section(name, sub) for name, sub in commands(parser()) if name != "ragrl")


def table(name: str) -> str:
    """The sub-commands of a command with their descriptions."""
    rows = [
        f"| `{full}` | {sentence(sub.description or '')} |"
        for full, sub in commands(parser())
        if full.startswith(f"ragrl {name} ")
    ]
    return "\n".join(["| command | measures |", "|---|---|", *rows, ""])


def section(name: str, sub: argparse.ArgumentParser) -> str:
    """The text of one command."""
    level = "##" if name.count(" ") == 1 else "###"
    parts = [f"{level} `{name}`\n", sentence(sub.description or ""), ""]
    options = [a for a in sub._actions if not isinstance(a, argparse._SubParsersAction)]
    options = [a for a in options if not isinstance(a, argparse._HelpAction) and is_shown(a)]
    parts += [option(name, action) for action in options]
    if sub.epilog:
        parts += [sentence(sub.epilog), ""]
    return "\n".join(parts)


# What help texts write without backticks: options, placeholders and `<name>`, a tag in HTML.
CODE = re.compile(r"(?<![\w`-])(--[\w-][^\s,;)]*|[\w./-]*<\w+>[\w./-]*|\w+:[A-Z]+\[[^\s,;)]*)")


def sentence(text: str) -> str:
    """Text with a capital and a full stop, and code in backticks."""
    text = " ".join(text.split())
    text = text[:1].upper() + text[1:] + ("" if text[-1:] in ".:" else ".")
    return (
        text
        if "`" in text
        else CODE.sub(lambda m: f"`{m[1].rstrip('.:')}`" + m[1][len(m[1].rstrip(".:")) :], text)
    )


def is_shown(action: argparse.Action) -> bool:
    """Whether an option is in the help; former names of options are not."""
    return action.help != argparse.SUPPRESS


def option(name: str, action: argparse.Action) -> str:
    """One option or argument as a definition."""
    names = ", ".join(action.option_strings) or (action.metavar or action.dest)
    value = "" if action.nargs == 0 or not action.option_strings else f" {value_name(action)}"
    term = f"`{names}{value}`"
    notes = []
    if action.required and action.option_strings:
        notes.append("required")
    if action.choices:
        notes.append("one of " + ", ".join(f"`{c}`" for c in action.choices))
    if action.default not in (None, "", (), argparse.SUPPRESS, False) and action.nargs != 0:
        notes.append(f"default `{action.default}`")
    text = (action.help or "").replace("%%", "%").strip()
    body = sentence(text) if text else ""
    tail = f" *({'; '.join(notes)})*" if notes else ""
    return f"{term}\n: {body}{tail}\n" if body or tail else f"{term}\n: \u00a0\n"


def value_name(action: argparse.Action) -> str:
    """What stands for the value of an option."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"{name} ..." if action.nargs in ("+", "*") else name
