"""The questions of a data set, and what an agent is told about them."""

from __future__ import annotations

from collections.abc import Sequence

from jax_ragrl.corpus.mixture import load_mixture
from jax_ragrl.corpus.world import generate
from jax_ragrl.types import Question

WORLD = "world"
INSTRUCTIONS = (
    "Answer the question in a few words. Search the corpus, as often as needed. Your last reply is "
    "the answer alone, without an explanation."
)


def load(data: str, split: str) -> Sequence[Question]:
    """Returns the questions of a split.

    Args:
      data: `world` for the encyclopedia that `ragrl data world` writes, or a set that ships with
        jax_ragrl (`mixture`, `nq`, `musique`).
      split: train, dev or test.

    Raises:
      UserError: there is no such file.
      KeyError: the encyclopedia has no such split.
    """
    return generate().questions[split] if data == WORLD else load_mixture(f"{data}:{split}")
