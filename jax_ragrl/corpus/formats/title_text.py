"""Passages with titles, mostly without ids: `[{"title", "text"}]`, as HippoRAG publishes them."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.look import look
from jax_ragrl.corpus.formats.own import own_fields, read_own_passages
from jax_ragrl.types import Passage, Question


def read_title_text(path: pathlib.Path | str) -> tuple[list[Question], Iterator[Passage]]:
    """Reads passages lazily; without ids these are `p0`, `p1`, ... because titles may repeat."""
    return [], read_own_passages(path, own_fields("passages", look(path).fields))
