"""DPR's Wikipedia table `psgs_w100.tsv`: columns `id, text, title`.

Karpukhin et al. 2020: 21 million passages of 100 words.
"""

from __future__ import annotations

import pathlib

from jax_ragrl.corpus.formats.files import field, read_table
from jax_ragrl.types import Passage, Question


def read_dpr(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Passages with the table's ids."""
    passages = []
    for record in read_table(path, "\t"):
        names = (field(record, name, str) for name in ("id", "title", "text"))
        passages.append(Passage(*names))
    return [], passages
