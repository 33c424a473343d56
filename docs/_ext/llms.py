"""Writes llms.txt (an index of the pages), llms-full.txt and each page as Markdown."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import generated
from sphinx.application import Sphinx


def summary(text: str) -> str:
    """The first sentence of the first paragraph below the title of a page."""
    body = re.sub(r"^(---\n.*?\n---\n)", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", body):
        block = block.strip()
        if block and not block.startswith(("#", "(", "<!--", ":::", "```", "|", "-")):
            plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(block.split()))
            return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0]
    return ""


def title(text: str) -> str:
    """The first heading of a page."""
    match = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    return match[1] if match else ""


def write(app: Sphinx, error: Exception | None) -> None:
    """Writes the files next to the pages; the order is that of the table of contents."""
    if error is not None or app.builder.name != "html":
        return
    out, pages = pathlib.Path(app.outdir), []
    for name in ordered(app):
        text = generated.filled(app.env.doc2path(name, base=True))
        file = out / f"{name}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        pages.append((name, text))
    url = app.config.html_baseurl
    lines = [f"- [{title(text)}]({url}{name}.md): {summary(text)}" for name, text in pages]
    head = f"# {app.config.project}\n\n> {summary(pages[0][1])}\n"
    (out / "llms.txt").write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    whole = "\n\n".join(text for name, text in pages if not name.startswith("reference/api/"))
    (out / "llms-full.txt").write_text(whole, encoding="utf-8")


def ordered(app: Sphinx) -> list[str]:
    """The names of all pages, in the order of the table of contents."""
    names: list[str] = []

    def visit(name: str) -> None:
        if name not in names:
            names.append(name)
            for child in app.env.toctree_includes.get(name, []):
                visit(child)

    visit(app.config.root_doc)
    return names


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the hook."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
