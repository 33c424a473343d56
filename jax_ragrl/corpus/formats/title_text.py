"""Passages without ids: `[{"title", "text"}]`, as HippoRAG publishes its collections."""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import field, read_records
from jax_ragrl.types import Passage, Question


def read_title_text(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Reads passages; the ids are `p0`, `p1`, ... because titles may repeat."""
    passages = []
    for n, record in enumerate(read_records(path)):
        passages.append(Passage(f"p{n}", field(record, "title", str), field(record, "text", str)))
    return [], passages
