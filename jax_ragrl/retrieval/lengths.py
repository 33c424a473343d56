"""Warnings of passages that are too long: for the encoder that cuts them, or for a prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from jax_ragrl.corpus.chunks import WORDS, Units
from jax_ragrl.types import Passage

# Counting every passage of a large corpus would take minutes, and a share needs few of them.
SAMPLE = 20_000
LONG = 512  # words: ten such passages are a prompt of about 7,000 tokens


class LongPassages(NamedTuple):
    """Passages above a limit.

    Fields:
      number: of these passages; an estimate from `SAMPLE` passages in a larger corpus.
      units: `words`, or the encoder whose tokens were counted.
    """

    number: int
    longest: int
    limit: int
    units: str


def long_passages(passages: Sequence[Passage], units: Units) -> LongPassages:
    """Counts the passages that an encoder would cut or, without one, of more than `LONG` words."""
    step = -(-len(passages) // SAMPLE) or 1
    sizes = [units.size(passages[n]) for n in range(0, len(passages), step)]
    limit = units.limit or LONG
    above = sum(size > limit for size in sizes)
    return LongPassages(above * step, max(sizes, default=0), limit, units.name)


def describe_long(long: LongPassages, total: int) -> str:
    """Returns a line about long passages with a remedy; empty if there are none."""
    if not long.number:
        return ""
    about = "about " if total > SAMPLE else ""
    head = f"{about}{min(long.number, total)} of {total} passages are longer than {long.limit}"
    chunks = "divide them with --chunk SIZE (data.chunk.size in a config)"
    if long.units == WORDS.name:
        return (
            f"{head} words (the longest {long.longest}), and few of them fit into a prompt: "
            f"{chunks}, such as {LONG // 2}"
        )
    return (
        f"{head} tokens (the longest {long.longest}), and the encoder {long.units} cuts the rest: "
        f"{chunks}, of at most {long.limit}"
    )


def report_long(passages: Sequence[Passage], units: Units) -> None:
    """Counts long passages in a line on stderr; `units` come from the encoder, or are words."""
    long = long_passages(passages, units)
    if line := describe_long(long, len(passages)):
        print(f"ragrl: warning: {line}", file=sys.stderr)
