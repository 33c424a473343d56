"""Warnings of passages that are too long: for the encoder that cuts them, or for a prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jax_ragrl.corpus.chunks import WORDS, Units
from jax_ragrl.types import Passage

# Counting every passage of a large corpus would take minutes, and a share needs few of them.
SAMPLE = 20_000
LONG = 512  # words: ten such passages are a prompt of about 7,000 tokens


def describe_long(passages: Sequence[Passage], units: Units) -> str:
    """Returns a line about passages that are too long, with a remedy; empty if there are none.

    They are those that an encoder cuts or, without one, of more than `LONG` words. Of more than
    `SAMPLE` passages their number is an estimate.
    """
    total = len(passages)
    step = -(-total // SAMPLE) or 1
    sizes = [units.size(passages[n]) for n in range(0, total, step)]
    limit, longest = units.limit or LONG, max(sizes, default=0)
    if longest <= limit:
        return ""
    number = min(total, step * sum(size > limit for size in sizes))
    head = f"{'about ' if step > 1 else ''}{number} of {total} passages are longer than {limit}"
    chunks = "divide them with --chunk SIZE (data.chunk.size in a config)"
    if units.name == WORDS.name:
        return (
            f"{head} words (the longest {longest}), and few of them fit into a prompt: {chunks}, "
            f"such as {LONG // 2}"
        )
    return (
        f"{head} tokens (the longest {longest}), and the encoder {units.name} cuts the rest: "
        f"{chunks}, of at most {limit}"
    )


def report_long(passages: Sequence[Passage], units: Units) -> None:
    """Prints `describe_long` on stderr; `units` come from the encoder, or are words."""
    if line := describe_long(passages, units):
        print(f"ragrl: warning: {line}", file=sys.stderr)
