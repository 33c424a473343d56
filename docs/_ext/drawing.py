"""`{drawing} name`: a file of docs/images, inlined so that it follows the colors of the page."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

IMAGES = pathlib.Path(__file__).parents[1] / "images"


class Drawing(SphinxDirective):
    """Inlines `images/<name>.svg`. The content is the caption."""

    required_arguments = 1
    has_content = True
    option_spec = {"alt": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        file = IMAGES / f"{self.arguments[0]}.svg"
        if not file.is_file():
            raise self.error(f"there is no drawing {file.name}: docs/images/draw.py makes them")
        self.env.note_dependency(str(file))
        svg = re.sub(r"^<\?xml.*?\?>\s*", "", file.read_text(encoding="utf-8"))
        figure = nodes.container(classes=["drawing"])
        figure += nodes.raw("", svg, format="html")
        if self.content:
            caption = nodes.container(classes=["drawing-caption"])
            self.state.nested_parse(self.content, self.content_offset, caption)
            figure += caption
        return [figure]


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive."""
    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
