"""BM25 over words, by the library `bm25s` (Lù 2024): sparse scores that are computed when indexing.

The score of a passage is the sum, over the words of the query, of idf(word) times a saturated count
of the word in the passage (Robertson and Zaragoza 2009); the methods differ as in Kamphuis et al.
2020. Words are runs of at least two letters or digits in lower case, without stop words, stemmed by
Snowball; scripts without blanks have pairs of characters. Hits have a word of the query.

index.json  corpus fingerprint, settings, count, and `reading`, see `Corpus`; written last
passages/   the corpus, see `corpus.store`, if it was read from a file
bm25/       scores per word, as `bm25s` writes them; memory-mapped
"""

from __future__ import annotations

import array
import dataclasses
import logging
import pathlib
import shutil
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_ragrl.corpus.chunks import WORDS
from jax_ragrl.corpus.passages import Corpus, passage_text
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.base import check_depth
from jax_ragrl.retrieval.description import (
    FILE,
    check_corpus,
    drop_versions,
    files_folder,
    read_description,
    reading_facts,
)
from jax_ragrl.retrieval.kinds import BM25Index
from jax_ragrl.retrieval.lengths import report_long
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.progress import track
from jax_ragrl.text.words import UNSPACED, search_words
from jax_ragrl.types import Hits

FOLDER = "bm25"
# The settings of an index that cannot change after it is built.
SETTINGS = ("language", "k1", "b", "method")


def _bm25s() -> Any:
    """Imports the library."""
    try:
        # On import it copies an array to the default device, which a guard of copies would refuse.
        with jax.transfer_guard("allow"):
            import bm25s
            import bm25s.stopwords
            import Stemmer  # noqa: F401 (imported here so that its absence is reported too)
    except ImportError as error:
        raise UserError(
            f"BM25 cannot be used ({error}): run 'pip install bm25s PyStemmer', or use the index "
            "kind 'exact'"
        ) from error
    # The import sets the level DEBUG: a program that logs would print a line per query.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


class Analyzer:
    """Splits a text into words that are searched, without stop words and stemmed.

    Args:
      language: a language of `BM25Index`; `none` keeps all words as they are.
    """

    def __init__(self, language: str) -> None:
        lists = _bm25s().stopwords
        self._stop_words: frozenset[str] = frozenset()
        self._stemmer: Any = None
        if language != "none":
            import Stemmer

            name = "EN" if language == "english" else language.upper()
            self._stop_words = frozenset(getattr(lists, f"STOPWORDS_{name}"))
            self._stemmer = Stemmer.Stemmer(language)
        self._lock = threading.Lock()

    def words(self, text: str) -> list[str]:
        """Returns the words of a text in order, repeated ones included."""
        # Letters alone are no words for `bm25s.tokenize` and scikit-learn, ideographs are.
        words = [w for w in search_words(text) if len(w) > 1 or UNSPACED.match(w)]
        words = [word for word in words if word not in self._stop_words]
        if self._stemmer is None:
            return words
        # A stemmer has a cache, which threads must not share.
        with self._lock:
            return list(self._stemmer.stemWords(words))


@dataclasses.dataclass(frozen=True)
class BM25Retriever:
    """Searches a corpus with BM25; `scores` is a `bm25s.BM25`."""

    corpus: Corpus
    analyzer: Analyzer
    scores: Any

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Returns up to `k` >= 1 passages with a word of a query, best first; ties by position."""
        check_depth(k)
        return [self._hits(query, k) for query in queries]

    def _hits(self, query: str, k: int) -> Hits:
        # A word that the query repeats counts each time, as in Lucene.
        numbers = self.scores.get_tokens_ids(self.analyzer.words(query))
        if not numbers:
            return Hits((), ())
        scores_X = self.scores.get_scores_from_ids(numbers)
        best_K = best_positive(scores_X, k)
        passages = tuple(self.corpus.passages[n] for n in best_K.tolist())
        return Hits(passages, tuple(scores_X[best_K].tolist()))


def best_positive(scores_X: np.ndarray, k: int) -> np.ndarray:
    """Returns the places of the k largest positive scores, int64 [up to k]; ties by place."""
    places = np.flatnonzero(scores_X > 0)
    if len(places) > k:
        scores = scores_X[places]
        # All ties of the last hit, so that the hits do not depend on the depth.
        places = places[scores >= np.partition(scores, -k)[-k]]
    return places[np.argsort(-scores_X[places], kind="stable")][:k]


def build_bm25(corpus: Corpus, index: BM25Index, folder: pathlib.Path | str) -> BM25Retriever:
    """Writes an index in place of an existing one, and opens it; `UserError` if it has no word."""
    folder = pathlib.Path(folder)
    library, analyzer = _bm25s(), Analyzer(index.language)
    folder.mkdir(parents=True, exist_ok=True)
    # Removed first and written last, so that its presence proves that the index is complete.
    (folder / FILE).unlink(missing_ok=True)
    report_long(corpus.passages, WORDS)
    passages = track(corpus.passages, "bm25", "passage", len(corpus))
    # Words are numbered by their first occurrence, so that equal texts give equal indexes. Arrays,
    # because a list of numbers takes twice the memory.
    number_of: dict[str, int] = {}
    rows = [
        array.array("i", [number_of.setdefault(w, len(number_of)) for w in analyzer.words(text)])
        for text in map(passage_text, passages)
    ]
    if not number_of:
        raise UserError(
            f"no passage of the corpus has a word in the language {index.language!r}: use the "
            "language 'none', or another kind of index"
        )
    scores = library.BM25(k1=index.k1, b=index.b, method=index.method, csc_backend="scipy")
    scores.index((rows, number_of), create_empty_token=False, show_progress=False)
    # New files, because runs that search the former index have mapped its files into memory.
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    scores.save(folder / FOLDER, show_progress=False)
    facts = {"corpus": corpus.fingerprint, "kind": index.kind, "count": len(corpus)}
    settings = {name: getattr(index, name) for name in SETTINGS}
    write_json(folder / FILE, {**facts, **settings, **reading_facts(corpus)})
    drop_versions(folder)
    return open_bm25(folder, corpus)


def open_bm25(folder: pathlib.Path | str, corpus: Corpus) -> BM25Retriever:
    """Opens an index; `UserError` if it is of another kind or corpus, or has damaged files."""
    folder, library = pathlib.Path(folder), _bm25s()
    description = read_description(folder)
    check_corpus(folder, description, corpus)
    try:
        files = files_folder(folder) / FOLDER
        scores = library.BM25.load(files, mmap=True, show_progress=False)
        # Scores of a passage without the word, which bm25l and bm25+ add to every passage.
        scores.nonoccurrence_array = None
        return BM25Retriever(corpus, Analyzer(description["language"]), scores)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / FOLDER} cannot be read ({type(error).__name__}: {error}): rerun 'ragrl "
            "data index'"
        ) from error


def open_or_build_bm25(
    corpus: Corpus, index: BM25Index, folder: pathlib.Path | str, *, may_build: bool = True
) -> BM25Retriever:
    """Opens the index of a folder, or builds it; `UserError` if it has other settings."""
    folder = pathlib.Path(folder)
    if may_build and not (folder / FILE).exists():
        return build_bm25(corpus, index, folder)
    check_bm25_settings(index, folder)
    return open_bm25(folder, corpus)


def check_bm25_settings(index: BM25Index, folder: pathlib.Path) -> None:
    """Raises `UserError` if the index in a folder was built with other settings."""
    description = read_description(folder)
    for name in ("kind", *SETTINGS):
        if description.get(name) != getattr(index, name):
            raise UserError(
                f"index {folder} has the {name} {description.get(name)}, but index.{name} is "
                f"{getattr(index, name)}: use the same settings, or another folder"
            )
