"""An index: a folder with the vectors of a corpus, built once and opened by every run.

index.json  corpus fingerprint, encoder, kind, dimension, count, dtype; written last. Of the kind
            `scann` also `files`, the SHA-256 of the searcher's, and `search`, see `tune`
passages/   the corpus, see `corpus.store`, if it was read from a file
vectors/    [count, dimension] in that dtype, TensorStore
encoder/    files of the encoder beyond its description
scann/      the trained searcher, for the kind `scann` above 20,000 passages
"""

from __future__ import annotations

import json
import pathlib
import random
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_ragrl.config.kinds import FORMER_HASHED_WORDS, HASHED_WORDS, check_recall
from jax_ragrl.config.schema import one_of
from jax_ragrl.corpus.duplicates import report_duplicates
from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.corpus.formats.qrels import questions_with_gold
from jax_ragrl.corpus.passages import Corpus, load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads
from jax_ragrl.models.encoder import from_description, load_encoder
from jax_ragrl.retrieval.dense import DenseRetriever, Searcher
from jax_ragrl.retrieval.embed import (
    DTYPES,
    PROGRESS,
    Encoder,
    embed,
    read_vectors,
    readable,
    write_vectors,
)
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.recall import describe_quality
from jax_ragrl.retrieval.scann import (
    BRUTE_FORCE,
    ScannSearcher,
    Setting,
    build_scann,
    hash_files,
)
from jax_ragrl.retrieval.tune import tune
from jax_ragrl.retrieval.vectors import open_vectors
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.types import Question

KINDS = ("exact", "scann")
FILE = "index.json"
PASSAGES = "passages"
# Imported vectors are checked by encoding a few passages again. Their relative distance must stay
# below a limit that tolerates formatting but not another passage: a title in quotes moves MiniLM's
# vectors by 0.10, and the next passage of a Wikipedia article differs by 0.70 (E5).
PROBES, MAX_DISTANCE = 16, 0.4


def _check_vectors(vectors: np.ndarray, corpus: Corpus, encoder: Encoder) -> np.ndarray:
    """Returns imported vectors as [X, D]; they may have been flat, [X * D].

    Raises `UserError` if they do not match the corpus and the encoder, judged by a few passages.
    """
    expected = (len(corpus), encoder.dimension)
    if vectors.shape not in (expected, (len(corpus) * encoder.dimension,)):
        raise UserError(
            f"vectors of shape {vectors.shape} do not fit a corpus and encoder of {expected}: "
            "give those of the same passages and model"
        )
    vectors_XD = vectors.reshape(expected)
    # Passages from the whole corpus: an offset or another order may begin late.
    sample = random.Random(0).sample(range(len(corpus)), min(PROBES, len(corpus)))
    probes_PD = encoder.encode_passages([corpus.passages[i] for i in sample])
    distance = np.linalg.norm(vectors_XD[sample] - probes_PD) / np.linalg.norm(probes_PD)
    if not distance < MAX_DISTANCE:
        raise UserError(
            f"the vectors of {len(sample)} passages differ from this encoder's by "
            f"{distance:.2f} of their length: give the model, the prefix and the corpus, in the "
            "same order, with which the vectors were computed"
        )
    return vectors_XD


def _searcher(
    kind: str, folder: pathlib.Path, count: int, search: Mapping[str, Any] | None = None
) -> Searcher:
    """Opens the searcher of an index, with the setting that `tune` chose, if it did."""
    if kind == "scann":
        values = [search[key] for key in Setting._fields if key in search] if search else []
        setting = Setting(*values) if values else None
        return ScannSearcher.open(folder / "scann", folder / "vectors", count, setting)
    with readable(folder / "vectors") as vectors_XD:
        return ExactSearcher(vectors_XD)


def build_index(
    corpus: Corpus,
    encoder: Encoder,
    kind: str,
    folder: pathlib.Path | str,
    vectors: np.ndarray | None = None,
    dtype: str = "float32",
    recall: float = 0.0,
) -> DenseRetriever:
    """Encodes a corpus, writes the index and opens it; resumes a build that was killed.

    Args:
      corpus: at least one passage.
      encoder: e.g. `HashedEncoder.fit(corpus.passages)` or `models.encoder.load_encoder(folder)`.
      kind: `exact` or `scann`.
      folder: created if it does not exist; an index in it is replaced.
      vectors: floats [X, D] that this encoder computed before (see `open_vectors`); None encodes
        the corpus.
      dtype: of the vectors on disk, and on the devices of an exact searcher; see `DTYPES`.
      recall: the recall for which `tune` tunes a searcher of the kind `scann`; 0: not tuned.

    Raises:
      UserError: unknown kind or dtype, ScaNN missing, a recall that the kind does not read, or
        vectors that do not fit.
    """
    one_of("index kind", kind, KINDS)
    one_of("index dtype", dtype, DTYPES)
    check_recall(recall, kind)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Removed first and written last, so that its presence proves that the index is complete.
    (folder / FILE).unlink(missing_ok=True)
    if vectors is None:
        parts = [corpus.fingerprint, _identity(encoder.describe()), dtype]
        identity = json.dumps(parts, sort_keys=True)
        embed(corpus.passages, encoder, folder / "vectors", identity, dtype)
    else:
        write_vectors(_check_vectors(vectors, corpus, encoder), folder / "vectors", dtype)
    encoder.save(folder / "encoder")
    facts = _build_scann(folder, recall) if kind == "scann" else {}
    _write_description(folder, corpus, encoder, {"kind": kind, "dtype": dtype, **facts})
    # After the description: a build that is killed before that point resumes from its progress.
    (folder / "vectors" / PROGRESS).unlink(missing_ok=True)
    return _open(folder, read_description(folder), corpus, encoder)


def _build_scann(folder: pathlib.Path, recall: float) -> dict[str, Any]:
    """Builds and tunes the searcher of an index; returns its facts for `index.json`."""
    vectors_XD = read_vectors(folder / "vectors")
    build_scann(vectors_XD, folder / "scann")
    files = hash_files(folder / "scann") if len(vectors_XD) >= BRUTE_FORCE else ""
    facts: dict[str, Any] = {"files": files} if files else {}
    if recall:
        searcher = ScannSearcher.open(folder / "scann", folder / "vectors", len(vectors_XD))
        facts["search"] = tune(searcher, vectors_XD, recall)
    return facts


def _write_description(
    folder: pathlib.Path, corpus: Corpus, encoder: Encoder, facts: Mapping[str, Any]
) -> None:
    description = {
        "corpus": corpus.fingerprint,
        "encoder": encoder.describe(),
        "dimension": encoder.dimension,
        "count": len(corpus),
        **facts,
    }
    write_json(folder / FILE, description)


def _open(
    folder: pathlib.Path, description: Mapping[str, Any], corpus: Corpus, encoder: Encoder
) -> DenseRetriever:
    search = description.get("search", {})
    searcher = _searcher(description["kind"], folder, description["count"], search)
    setting = [search[key] for key in Setting._fields if key in search]
    build = " ".join(map(str, [description.get("files", ""), *setting])).strip()
    return DenseRetriever(corpus, encoder, searcher, build)


def read_description(folder: pathlib.Path | str) -> dict[str, Any]:
    """Reads `index.json` of an index folder.

    Raises:
      UserError: the folder holds no index.
    """
    path = pathlib.Path(folder) / FILE
    try:
        description: dict[str, Any] = loads(path.read_bytes())
        encoder = description.get("encoder", {})
        kind = encoder.get("kind")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder} holds no complete index ({FILE}): run 'ragrl index' first, or delete the "
            "folder if 'ragrl train' made it"
        ) from error
    if kind == FORMER_HASHED_WORDS:
        encoder["kind"] = HASHED_WORDS
    return description


def check_corpus(folder: pathlib.Path, description: dict[str, Any], corpus: Corpus) -> None:
    """Raises `UserError` if the index of a folder was built for another corpus.

    Args:
      folder: of the index.
      description: its `index.json`.
      corpus: the corpus that it is opened with.
    """
    if description["corpus"] != corpus.fingerprint:
        raise UserError(
            f"index {folder} was built for corpus {description['corpus']}, but "
            f"{corpus.fingerprint} is loaded: rerun 'ragrl index', or give the corpus it was built "
            "for"
        )


def _reload(description: dict[str, Any], folder: pathlib.Path) -> Encoder:
    """Loads the encoder with which an index was built."""
    if description["kind"] == HASHED_WORDS:
        return HashedEncoder.load(folder / "encoder")
    return from_description(description)


def _identity(description: dict[str, Any]) -> dict[str, Any]:
    """Returns a description without the model's path, because a folder may move."""
    return {name: value for name, value in description.items() if name != "source"}


def open_index(
    folder: pathlib.Path | str, corpus: Corpus, encoder: Encoder | None = None
) -> DenseRetriever:
    """Opens an index with the corpus for which it was built.

    Args:
      folder: written by `build_index`.
      corpus: the same passages in the same order.
      encoder: None loads the encoder named in the index; another encoder must equal it.

    Raises:
      UserError: no index, another corpus (the error names both fingerprints), another encoder.
    """
    folder = pathlib.Path(folder)
    description = read_description(folder)
    check_corpus(folder, description, corpus)
    encoder = _reload(description["encoder"], folder) if encoder is None else encoder
    # Vectors of different encoders are not comparable, although a search would return hits.
    if _identity(encoder.describe()) != _identity(description["encoder"]):
        raise UserError(
            f"index {folder} was built with the encoder {description['encoder']}, but "
            f"{encoder.describe()} is loaded: rerun 'ragrl index'"
        )
    return _open(folder, description, corpus, encoder)


def load_indexed(path: pathlib.Path, folder: pathlib.Path | None) -> Corpus:
    """Reads the corpus of a file and caches its passages in the folder of an index.

    The index may exist, or be built later. Without a folder the passages are kept in memory.

    Raises:
      UserError: as `load_corpus`; or the index was built for another corpus.
    """
    if folder is None:
        return load_corpus(path)
    expected = read_description(folder)["corpus"] if (folder / FILE).exists() else ""
    return load_corpus(path, folder=folder / PASSAGES, expected_fingerprint=expected)


def make_encoder(name: str, corpus: Corpus, **prefixes: str | None) -> Encoder:
    """Loads an encoder: `hashed`, `minilm`, or the folder or name of a text encoder.

    Args:
      name: the name or folder.
      corpus: the weights of hashed words are computed from it.
      prefixes: see `models.encoder.load_encoder`.

    Raises:
      UserError: the folder holds no such model, or MiniLM's package is not installed.
    """
    if name not in (HASHED_WORDS, FORMER_HASHED_WORDS):
        return load_encoder(name, **prefixes)
    if any(prefixes.values()):
        raise UserError("a prefix was given, but hashed words have none: omit it")
    return HashedEncoder.fit(corpus.passages)


def with_gold(path: pathlib.Path | str | None, qrels: pathlib.Path | str | None) -> list[Question]:
    """Returns the questions on which recall is measured; none without a path."""
    if path is None:
        if qrels is not None:
            raise UserError(f"--qrels {qrels} needs the questions that it judges: give --questions")
        return []
    questions = load_questions(path)
    if qrels is not None:
        return questions_with_gold(questions, qrels)
    if gold := [question for question in questions if question.gold]:
        return gold
    raise UserError(
        f"{path} names no gold passages, which recall needs: give --qrels, or omit --questions"
    )


def run_index(
    corpus_path: pathlib.Path | str,
    out: pathlib.Path | str,
    encoder: str = HASHED_WORDS,
    kind: str = "exact",
    questions_path: pathlib.Path | str | None = None,
    vectors_path: pathlib.Path | str | None = None,
    dtype: str = "float32",
    qrels_path: pathlib.Path | str | None = None,
    near_duplicates: bool = False,
    recall: float = 0.0,
    **prefixes: str | None,
) -> dict[str, Any]:
    """Builds an index from a file; implements `ragrl index`.

    Args:
      corpus_path: passages in any known format.
      out: the index folder.
      encoder: see `make_encoder`.
      kind: `exact` or `scann`.
      questions_path: questions in any known format; recall is measured on those with gold.
      vectors_path: a file of vectors that this encoder computed before.
      dtype: of the vectors, see `build_index`.
      qrels_path: relevance judgments (TREC or BEIR), which replace the questions' own gold.
      near_duplicates: whether near duplicates are counted, too.
      recall: see `build_index`.
      prefixes: see `make_encoder`.

    Returns:
      A report for JSON: corpus, encoder, kind, count, dimension, seconds (encoding and building),
      `duplicates` (see `describe_duplicates`), with a recall also `search` (see `tune`); with
      questions also their number, the result of
      `search_quality`, and the number of `gold` passages and of those that the corpus lacks.

    Raises:
      UserError: an argument cannot be used.
    """
    one_of("index kind", kind, KINDS)
    one_of("index dtype", dtype, DTYPES)
    check_recall(recall, kind)
    # Read before the long work, so that a wrong path fails immediately.
    questions = with_gold(questions_path, qrels_path)
    vectors = None if vectors_path is None else open_vectors(vectors_path)
    out = _writable_folder(out)
    corpus = load_corpus(corpus_path, folder=out / PASSAGES)
    start = time.perf_counter()
    passage_encoder = make_encoder(encoder, corpus, **prefixes)
    retriever = build_index(corpus, passage_encoder, kind, out, vectors, dtype, recall)
    seconds = round(time.perf_counter() - start, 2)
    report: dict[str, Any] = {"corpus": corpus.fingerprint, "encoder": encoder, "kind": kind}
    report |= {"count": len(corpus), "dimension": retriever.encoder.dimension, "seconds": seconds}
    if recall:
        report["search"] = read_description(out)["search"]
    report["duplicates"] = report_duplicates(corpus, near_duplicates)
    return report | describe_quality(retriever, questions, corpus)


def _writable_folder(path: pathlib.Path | str) -> pathlib.Path:
    """Creates a folder and returns its path; raises `OSError` if it is not writable."""
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass  # fail now if the folder is not writable, before the corpus is read
    return folder
