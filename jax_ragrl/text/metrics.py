"""Answer metrics and their intervals: strings in, floats out.

Two conventions of normalisation are in use and give different numbers: `delete` removes
punctuation ("U.S." becomes "us": SQuAD, CoDA, MAO-ARAG), `space` replaces it by a space and
decomposes unicode first ("u s": MMOA-RAG).
"""

from __future__ import annotations

import collections
import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jax_ragrl.errors import UserError

ARTICLES = re.compile(r"\b(a|an|the)\b")
DELETE = str.maketrans("", "", string.punctuation)
SPACE = str.maketrans(dict.fromkeys(string.punctuation, " "))
# Answers that share words with longer ones by accident: they match entirely or not at all.
CLOSED = frozenset(("yes", "no", "noanswer"))
BLOCK = 4_000_000  # resampled indices held at once


def normalise(text: str, punct: str = "delete") -> str:
    """Lower case, no punctuation, no articles, single spaces (Rajpurkar et al. 2016).

    Args:
      text: any string.
      punct: `delete` (SQuAD) or `space` (MMOA-RAG: NFD first, then punctuation to spaces).

    Raises:
      UserError: an unknown `punct`.
    """
    if punct == "delete":
        text = text.lower().translate(DELETE)
    elif punct == "space":
        text = unicodedata.normalize("NFD", text).lower().translate(SPACE)
    else:
        raise UserError(f"punct={punct!r} is not known: use 'delete' (SQuAD) or 'space'")
    return " ".join(ARTICLES.sub(" ", text).split())


def _best(
    score: Callable[[str, str], float], prediction: str, answers: Sequence[str], punct: str
) -> float:
    """The best score over the gold answers; 0 without gold."""
    if isinstance(answers, str):
        raise TypeError(f"answers must be a sequence of strings, got the string {answers!r}")
    said = normalise(prediction, punct)
    return max((score(said, normalise(gold, punct)) for gold in answers), default=0.0)


def _exact(said: str, gold: str) -> float:
    return float(said == gold)


def _overlap(said: str, gold: str) -> float:
    """Harmonic mean of token precision and recall, counted with multiplicity."""
    if said == gold:
        return 1.0
    if said in CLOSED or gold in CLOSED:
        return 0.0
    said_tokens, gold_tokens = said.split(), gold.split()
    shared = collections.Counter(said_tokens) & collections.Counter(gold_tokens)
    return 2.0 * shared.total() / (len(said_tokens) + len(gold_tokens))


def _covered(said: str, gold: str) -> float:
    # An empty gold is a substring of everything: it only matches an empty prediction.
    return float(gold in said if gold else not said)


def _covered_tokens(said: str, gold: str) -> float:
    return float(f" {gold} " in f" {said} " if gold else not said)


def exact_match(prediction: str, answers: Sequence[str], *, punct: str = "delete") -> float:
    """1.0 iff the prediction equals a gold answer after `normalise`; 0.0 without gold."""
    return _best(_exact, prediction, answers, punct)


def f1(prediction: str, answers: Sequence[str], *, punct: str = "delete") -> float:
    """Bag-of-tokens F1, the maximum over gold answers; 0.0 without gold.

      F1 = 2 |P ∩ G| / (|P| + |G|)

    HotpotQA's guard: where either side is yes, no or noanswer, only equality scores. Two strings
    that are both empty after `normalise` are equal (SQuAD 2.0).
    """
    return _best(_overlap, prediction, answers, punct)


def cover_match(prediction: str, answers: Sequence[str], *, punct: str = "delete") -> float:
    """1.0 iff a normalised gold is a *substring* of the prediction ("no" is in "north")."""
    return _best(_covered, prediction, answers, punct)


def cover_match_tokens(prediction: str, answers: Sequence[str], *, punct: str = "delete") -> float:
    """1.0 iff a normalised gold is a run of whole tokens of the normalised prediction."""
    return _best(_covered_tokens, prediction, answers, punct)


def _resampled_means(x_N: np.ndarray, samples: int) -> Iterator[np.ndarray]:
    """Means of `samples` resamples with replacement, block by block to bound memory."""
    rng = np.random.default_rng(0)  # equal scores have equal intervals
    block = max(1, BLOCK // len(x_N))
    for start in range(0, samples, block):
        rows = min(block, samples - start)
        yield x_N[rng.integers(len(x_N), size=(rows, len(x_N)))].mean(axis=1)


def bootstrap_interval(
    x: Sequence[float] | np.ndarray, *, samples: int = 10000
) -> tuple[float, float, float]:
    """Mean and 95 % percentile bootstrap interval of the mean (Efron 1979).

    Args:
      x: one score a question, finite.
      samples: resamples drawn.

    Returns:
      (mean, low, high).

    Raises:
      UserError: `x` is empty, not one-dimensional or not finite.
    """
    x_N = np.asarray(x, dtype=np.float64)
    if x_N.ndim != 1 or x_N.size == 0 or not np.isfinite(x_N).all():
        raise UserError(
            f"scores of shape {x_N.shape} have no interval: give one finite number a question"
        )
    means = np.concatenate(list(_resampled_means(x_N, samples)))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(x_N.mean()), float(low), float(high)


def paired_bootstrap(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray
) -> tuple[float, float, float]:
    """Mean of `a - b` over the same questions, with its 95 % interval (Koehn 2004).

    Args:
      a, b: scores of two systems, the same questions in the same order.

    Returns:
      (mean_difference, low, high): the systems differ where the interval leaves out 0.

    Raises:
      UserError: different lengths, or what `bootstrap_interval` refuses.
    """
    if len(a) != len(b):
        raise UserError(
            f"{len(a)} and {len(b)} scores cannot be paired: score both on the same questions"
        )
    difference_N = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    return bootstrap_interval(difference_N)
