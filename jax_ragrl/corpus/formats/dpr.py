"""DPR's Wikipedia table `psgs_w100.tsv`: columns `id, text, title`.

Karpukhin et al. 2020: 21 million passages of 100 words.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jax_ragrl.corpus.formats.files import field, read_table
from jax_ragrl.types import Passage, Question


def read_dpr(path: pathlib.Path | str) -> tuple[list[Question], Iterator[Passage]]:
    """Reads passages lazily, with the ids of the table."""
    # In the order of a passage's fields; the table has the text before the title.
    names = ("id", "title", "text")
    return [], (
        Passage(*(field(record, name, str) for name in names)) for record in read_table(path, "\t")
    )
