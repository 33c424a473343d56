"""Fills pages with what is generated from the code.

A line `<!-- generated: NAME ARGUMENTS -->` of a page is replaced with the Markdown that the
function NAME of `MAKERS` returns, each time the page is read. Nothing generated is committed.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import api
import claim_table
import commands
import config_keys
import docstrings
import glossary
import metrics
import papers
import results
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.roles import XRefRole

MAKERS: dict[str, Callable[..., str]] = {
    "config": config_keys.markdown,
    "commands": commands.markdown,
    "subcommands": commands.table,
    "metrics": metrics.markdown,
    "results": results.markdown,
    "real_gains": results.real_gains,
    "trial_gains": results.trial_gains,
    "claims": claim_table.markdown,
    "public": api.public,
    "api": api.markdown,
    "departures": docstrings.departures,
    "config_file": docstrings.config_file,
    "faults": glossary.faults,
    "axes": glossary.axes,
    "paper": papers.markdown,
    "planned": papers.planned,
}
MARK = re.compile(r"^<!-- generated: (\w+)((?: [\w./]+)*) -->$", re.MULTILINE)


@functools.cache
def made(name: str, *arguments: str) -> str:
    """What a maker returns."""
    return MAKERS[name](*arguments)


def fill(text: str) -> str:
    """A page's text with its marks replaced."""
    return MARK.sub(lambda match: made(match[1], *match[2].split()), text)


def filled(file: str | pathlib.Path) -> str:
    """The text of a file of docs/ as a reader sees it."""
    return fill(pathlib.Path(file).read_text(encoding="utf-8"))


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Replaces the marks of a page that is about to be parsed."""
    source[0] = fill(source[0])


def always(app: Sphinx, env: Any, *changes: set[str]) -> list[str]:
    """The pages with marks: they change with the code, which Sphinx does not watch."""
    files = {name: pathlib.Path(env.doc2path(name)) for name in env.found_docs}
    return [n for n, f in files.items() if MARK.search(f.read_text(encoding="utf-8"))]


def key_signature(env: Any, text: str, node: addnodes.desc_signature) -> str:
    """Shows `target | name: type = default`; the target is the name of the link."""
    target, _, shown = text.partition(" | ")
    name, _, rest = (shown or target).partition(": ")
    kind, _, default = rest.partition(" = ")
    node += addnodes.desc_name(name, name)
    if kind:
        node += addnodes.desc_annotation(kind, "", nodes.Text(f"  {kind}"))
    if default:
        node += addnodes.desc_annotation(default, "", nodes.Text(f" = {default}"))
    return target if shown else name


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the hooks and the two kinds of entries."""
    app.connect("source-read", read)
    app.connect("env-get-outdated", always)
    app.add_object_type("config-key", "key", "%s", parse_node=key_signature)
    app.add_role_to_domain("std", "key", XRefRole(warn_dangling=True), override=True)
    app.add_object_type("metric", "metric", "%s", parse_node=key_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
