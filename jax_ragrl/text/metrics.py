"""Answer metrics and their confidence intervals.

Two conventions of normalization give different numbers: `delete` removes punctuation ("U.S."
becomes "us": SQuAD, CoDA, MAO-ARAG); `space` decomposes Unicode first and replaces punctuation by a
space ("u s": MMOA-RAG). The argument `punct` of a metric names one. Beyond the papers' scripts, the
punctuation of all of Unicode counts, canonically equal texts and full-width forms are equal, and
each character of a script without blanks is a token (`text.words`; Lewis et al. 2020, MLQA).
"""

from __future__ import annotations

import collections
import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.text.words import word_spans

ARTICLES = re.compile(r"\b(a|an|the)\b")
FULL_WIDTH = re.compile("[\u3000\uff00-\uffef]+")  # and half-width forms


class _Punctuation(dict[int, str]):
    """A table for `str.translate` that replaces punctuation by a text."""

    def __init__(self, replacement: str):
        # Also the accents and the minus sign that stand for an apostrophe and a hyphen.
        super().__init__(str.maketrans(dict.fromkeys(f"{string.punctuation}´ʻʼ−", replacement)))
        self._replacement = replacement

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_punctuation = unicodedata.category(character).startswith("P")
        self[code] = self._replacement if is_punctuation else character
        return self[code]


DELETE, SPACE = _Punctuation(""), _Punctuation(" ")
# Short answers that share words with longer answers by accident: only an exact match counts.
CLOSED = frozenset(("yes", "no", "noanswer"))
EQUAL = 1e-9  # scores that differ by less are equal but for rounding
BLOCK = 4_000_000  # resampled indices in memory at once


def normalize(text: str, punct: str = "delete", *, articles: bool = False) -> str:
    """Removes case, punctuation, articles and repeated spaces (Rajpurkar et al. 2016).

    `punct` is `delete` or `space`, see above; with `articles` the articles are kept.

    Raises:
      UserError: `punct` is neither.
    """
    text = FULL_WIDTH.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    if punct == "delete":
        text = unicodedata.normalize("NFC", text).lower().translate(DELETE)
    elif punct == "space":
        text = unicodedata.normalize("NFD", text).lower().translate(SPACE)
    else:
        raise UserError(f"punct is {punct!r}: use 'delete' (SQuAD) or 'space'")
    return " ".join((text if articles else ARTICLES.sub(" ", text)).split())


def _tokens(text: str) -> list[str]:
    return [text[start:end] for start, end in word_spans(text)]


def _best(
    score: Callable[[str, str], float], prediction: str, answers: Sequence[str], punct: str
) -> float:
    """The best score over the gold answers; 0 without gold answers."""
    # A string is a sequence of its characters, which would be compared one by one.
    if isinstance(answers, str):
        raise TypeError(f"answers must be a sequence of strings, got the string {answers!r}")
    answer = normalize(prediction, punct)
    return max((_score(score, prediction, answer, gold, punct) for gold in answers), default=0.0)


def _score(
    score: Callable[[str, str], float], prediction: str, answer: str, gold: str, punct: str
) -> float:
    """The score for one gold answer of a prediction, whose normalized text is `answer`."""
    reference = normalize(gold, punct)
    if answer or reference:
        return score(answer, reference)
    # Nothing is left of "The", "A" or "!!!", which are different answers. No answer is right.
    kept = [normalize(text, punct, articles=True) for text in (prediction, gold)]
    if not any(kept):
        kept = ["".join(text.casefold().split()) for text in (prediction, gold)]
    return float(bool(kept[0]) and kept[0] == kept[1])


def _overlap(answer: str, gold: str) -> float:
    """The harmonic mean of token precision and recall, counted with multiplicity."""
    if answer == gold:
        return 1.0
    if answer in CLOSED or gold in CLOSED:
        return 0.0
    answer_tokens, gold_tokens = _tokens(answer), _tokens(gold)
    common = collections.Counter(answer_tokens) & collections.Counter(gold_tokens)
    return 2.0 * common.total() / (len(answer_tokens) + len(gold_tokens))


def _covered_tokens(answer: str, gold: str) -> float:
    # Spaces around both strings restrict the match to whole tokens.
    tokens, gold_tokens = (" ".join(_tokens(text)) for text in (answer, gold))
    return float(bool(gold) and f" {gold_tokens} " in f" {tokens} ")


def exact_match(prediction: str, answers: Sequence[str], *, punct: str = "delete") -> float:
    """Returns 1.0 if the prediction equals a gold answer after `normalize` by `punct`, else 0.0."""
    return _best(lambda answer, gold: float(answer == gold), prediction, answers, punct)


def f1(prediction: str, answers: Sequence[str], *, punct: str = "delete") -> float:
    """Returns the bag-of-tokens F1, the maximum over gold answers; 0.0 without gold answers.

      F1 = 2 |P ∩ G| / (|P| + |G|)

    If either side is yes, no or noanswer, only equality scores (HotpotQA).
    """
    return _best(_overlap, prediction, answers, punct)


def cover_match(prediction: str, answers: Sequence[str], *, punct: str = "delete") -> float:
    """Returns 1.0 if a gold answer is a *substring* of the prediction ("no" is in "north")."""
    # An empty string is a substring of every string.
    return _best(lambda a, gold: float(bool(gold) and gold in a), prediction, answers, punct)


def cover_match_tokens(prediction: str, answers: Sequence[str], *, punct: str = "delete") -> float:
    """Returns 1.0 if the tokens of a gold answer are consecutive tokens of the prediction."""
    return _best(_covered_tokens, prediction, answers, punct)


# From an answer and the gold answers to a score from 0 to 1. The module of a system may add a
# metric, which then is a column of every table.
METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "cover_em": cover_match,
    "cover_em_tokens": cover_match_tokens,
    "em": exact_match,
    "f1": f1,
}
METRIC_NAMES = {"cover_em": "cover-EM", "cover_em_tokens": "cover-EM", "em": "EM", "f1": "F1"}


def training_metric(name: str) -> Callable[[str, Sequence[str]], float]:
    """Returns the metric that decides what is right in training, for the metric of a table.

    The substring of cover-EM accepts "I do not know." for "no", so its tokens decide.
    """
    return METRICS["cover_em_tokens" if name == "cover_em" else name]


def _resampled_means(x_N: np.ndarray, samples: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yields the means of resamples with replacement, in blocks that bound the memory."""
    rng = np.random.default_rng(seed)  # a fixed seed: equal scores have equal intervals
    block = max(1, BLOCK // len(x_N))
    for start in range(0, samples, block):
        rows = min(block, samples - start)
        yield x_N[rng.integers(len(x_N), size=(rows, len(x_N)))].mean(axis=1)


def bootstrap_interval(
    x: Sequence[float] | np.ndarray,
    *,
    samples: int = 10000,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[float, float, float]:
    """Returns a mean and its 95 % percentile bootstrap interval (Efron 1979): (mean, low, high).

    Resamples of equal scores are equal, although another question may have another score. Then the
    interval is exact: if none of N questions has another score, the share of such questions is at
    most p = 1 - 0.025^(1/N) (Clopper and Pearson 1934), and they may have a score at the `bounds`,
    the lowest and the highest possible one.

    Raises:
      UserError: `x` is empty, not one-dimensional or not finite.
    """
    x_N = np.asarray(x, dtype=np.float64)
    if x_N.ndim != 1 or x_N.size == 0 or not np.isfinite(x_N).all():
        raise UserError(
            f"scores of shape {x_N.shape} have no interval: give one finite number per question"
        )
    mean = float(x_N.mean())
    if np.ptp(x_N) < EQUAL:
        share = 1.0 - 0.025 ** (1.0 / len(x_N))
        low, high = (mean + share * (bound - mean) for bound in bounds)
        return mean, min(low, mean), max(high, mean)
    means = np.concatenate(list(_resampled_means(x_N, samples)))
    low, high = np.percentile(means, [2.5, 97.5])
    return mean, float(low), float(high)


def hierarchical_bootstrap(
    groups: Sequence[np.ndarray], *, samples: int = 10000
) -> tuple[float, float, float]:
    """Returns the mean over groups of their means, with its 95 % interval: (mean, low, high).

    A resample draws as many groups as there are, with replacement, and within each drawn group its
    questions (Davison and Hinkley 1997, section 3.8). Several seeds that answer the same questions
    are one group, of which a resample draws seeds and, for all of them alike, questions (the
    pigeonhole bootstrap, Owen 2007). A few groups or seeds do not estimate their own variance well:
    with three, the interval is too narrow. A group is float64 `[Q]`, or `[S, Q]` of seeds; NaN does
    not count.

    Raises:
      UserError: there are no groups, or one has no finite score.
    """
    tables = []  # the seeds and the questions with a finite score; other scores become NaN
    for x in groups:
        x_SQ = np.atleast_2d(np.asarray(x, np.float64))
        x_SQ = np.where(np.isfinite(x_SQ), x_SQ, np.nan)
        is_nan_SQ = np.isnan(x_SQ)
        tables.append(x_SQ[~is_nan_SQ.all(axis=1)][:, ~is_nan_SQ.all(axis=0)])
    if not tables or not all(x_SQ.size for x_SQ in tables):
        raise UserError(
            f"{len(tables)} groups of scores have no interval: give at least one group, and at "
            "least one finite number in each"
        )
    drawn_BS = np.random.default_rng(1).integers(len(tables), size=(samples, len(tables)))
    means_BS = np.empty(drawn_BS.shape)
    for number, x_SQ in enumerate(tables):
        where_BS = drawn_BS == number
        draws = list(_crossed_means(x_SQ, int(where_BS.sum()), seed=number))
        means_BS[where_BS] = np.concatenate(draws) if draws else 0.0
    low, high = np.percentile(means_BS.mean(axis=1), [2.5, 97.5])
    return float(np.mean([np.nanmean(x_SQ) for x_SQ in tables])), float(low), float(high)


def _crossed_means(x_SQ: np.ndarray, samples: int, seed: int) -> Iterator[np.ndarray]:
    """Yields the means of resamples of seeds and questions, in blocks that bound the memory."""
    seeds, questions = x_SQ.shape
    if seeds == 1:
        yield from _resampled_means(x_SQ[0], samples, seed)
        return
    rng, known_SQ = np.random.default_rng(seed), ~np.isnan(x_SQ)
    filled_SQ, block = np.where(known_SQ, x_SQ, 0.0), max(1, BLOCK // questions)
    for start in range(0, samples, block):
        rows = min(block, samples - start)
        # How often each seed and each question is drawn.
        times_BS, times_BQ = (rng.multinomial(n, [1 / n] * n, size=rows) for n in x_SQ.shape)
        total_B, count_B = (
            np.sum(times_BS @ values_SQ * times_BQ, axis=1) for values_SQ in (filled_SQ, known_SQ)
        )
        # Without a score, which only a table with few of them allows, the mean is that of all.
        yield np.where(count_B, total_B / np.maximum(count_B, 1), np.nanmean(x_SQ))


def paired_bootstrap(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray
) -> tuple[float, float, float]:
    """Returns the mean of `a - b` over the same questions, with its 95 % interval (Koehn 2004).

    The scores are from 0 to 1, in the same order. Of (mean_difference, low, high): the systems
    differ if the interval does not contain 0.

    Raises:
      UserError: the lengths differ, or the scores are empty or not finite.
    """
    if len(a) != len(b):
        raise UserError(
            f"{len(a)} and {len(b)} scores cannot be paired: score both on the same questions"
        )
    # Resampling differences keeps each pair together: correlated scores have a narrower interval.
    difference_N = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    return bootstrap_interval(difference_N, bounds=(-1.0, 1.0))
