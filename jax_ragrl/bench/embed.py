"""Measures how fast a text encoder embeds the first passages of a corpus."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from jax_ragrl.bench.train import Timing, peak_bytes, time_step
from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.models.encoder import load_encoder


@dataclasses.dataclass(frozen=True)
class EmbedWork:
    """The measured work: one call that embeds `count` passages.

    Fields:
      corpus: file of passages in a known format.
      encoder: `minilm`, a folder, or a name on the Hugging Face Hub.
      count: number of passages, from the start of the corpus.
      repeats: number of timed calls, after one that compiles; the fastest counts.
    """

    corpus: pathlib.Path
    encoder: str = "minilm"
    count: int = 1000
    repeats: int = 2

    def texts(self) -> list[str]:
        """Returns the texts to embed, as an index embeds them but for the prefix of the encoder.

        Raises:
          UserError: the corpus has too few passages.
        """
        passages = load_corpus(self.corpus).passages[: self.count]
        if len(passages) < self.count:
            raise UserError(
                f"{self.corpus} has {len(passages)} passages, fewer than --count {self.count}: "
                "lower it"
            )
        return [passage_text(passage) for passage in passages]


def bench_embed(work: EmbedWork, reference_XD: np.ndarray | None = None) -> dict[str, Any]:
    """Measures `TextEncoder.encode`, tokenization included.

    Args:
      work: the work.
      reference_XD: vectors of the same passages by another library.

    Returns:
      The work, its `tokens` without padding, the fields of `embedding_speed`, and with a reference
      `smallest_cosine` of a vector with its reference.
    """
    texts, encoder = work.texts(), load_encoder(work.encoder)
    timing = time_step(lambda: encoder.encode(texts), work.repeats)
    result = {
        "device": jax.devices()[0].device_kind,
        **dataclasses.asdict(work),
        "corpus": work.corpus.name,
        "tokens": sum(map(len, encoder.tokenize(texts))),
        **embedding_speed(timing, work.count),
        "first_s": round(timing.first, 2),
        "peak_bytes": peak_bytes(),
    }
    if reference_XD is not None:
        result["smallest_cosine"] = smallest_cosine(encoder.encode(texts), reference_XD)
    return result


def embedding_speed(timing: Timing, count: int) -> dict[str, float]:
    """Returns the seconds and CPU seconds of a call, and its passages per second."""
    return {
        "embed_s": round(timing.seconds, 3),
        "embed_cpu_s": round(timing.cpu, 3),
        "passages_per_s": round(count / timing.seconds, 1),
    }


def smallest_cosine(x_XD: np.ndarray, y_XD: np.ndarray) -> float:
    """Returns the smallest cosine of two vectors in the same row."""
    norms_X = np.linalg.norm(x_XD, axis=1) * np.linalg.norm(y_XD, axis=1)
    return round(float(np.min(np.sum(x_XD * y_XD, axis=1) / norms_X)), 6)
