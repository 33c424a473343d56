"""An index: a folder with the vectors of a corpus, made once and opened by every run.

index.json  corpus fingerprint, encoder, kind, dimension, count, dtype; written last
passages/   the corpus, see `corpus.store`, where it came from a file
vectors/    [count, dimension] in this dtype, TensorStore
encoder/    what the encoder needs beyond its description
scann/      the trained searcher, for the kind `scann` above some 20 000 passages
"""

from __future__ import annotations

import json
import pathlib
import random
import tempfile
import time
from typing import Any

import numpy as np

from jax_ragrl.config.schema import one_of
from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.corpus.formats.qrels import judged
from jax_ragrl.corpus.passages import Corpus, load_corpus
from jax_ragrl.errors import UserError
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
from jax_ragrl.retrieval.lexical import LexicalEncoder
from jax_ragrl.retrieval.recall import recall
from jax_ragrl.retrieval.scann import ScannSearcher, build_scann
from jax_ragrl.retrieval.vectors import open_vectors
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.types import Question

KINDS = ("exact", "scann")
FILE = "index.json"
PASSAGES = "passages"
# Of vectors made elsewhere so many are made again, and may differ by so much of their length: a
# title in quotes changes MiniLM's by 0.10, the next passage of a Wikipedia E5's by 0.70.
PROBES, FAR = 16, 0.4


def _checked(vectors: np.ndarray, corpus: Corpus, encoder: Encoder) -> np.ndarray:
    """Vectors [X, D], one after the other until now perhaps.

    Raises `UserError` where they are not those of a corpus and an encoder, as far as a few tell.
    """
    expected = (len(corpus), encoder.dimension)
    if vectors.shape not in (expected, (len(corpus) * encoder.dimension,)):
        raise UserError(
            f"vectors of shape {vectors.shape} do not fit a corpus and encoder of {expected}: "
            "give those of the same passages and model"
        )
    vectors_XD = vectors.reshape(expected)
    some = random.Random(0).sample(range(len(corpus)), min(PROBES, len(corpus)))
    made_PD = encoder.encode_passages([corpus.passages[i] for i in some])
    gap = np.linalg.norm(vectors_XD[some] - made_PD) / np.linalg.norm(made_PD)
    if not gap < FAR:
        raise UserError(
            f"vectors of {len(some)} passages differ from what this encoder makes of them by "
            f"{gap:.2f} of their length: give the model, the prefix and the corpus, in its order, "
            "that they were made with"
        )
    return vectors_XD


def _searcher(kind: str, folder: pathlib.Path, count: int) -> Searcher:
    if kind == "scann":
        return ScannSearcher.open(folder / "scann", folder / "vectors", count)
    with readable(folder / "vectors") as vectors_XD:
        return ExactSearcher(vectors_XD)


def build_index(
    corpus: Corpus,
    encoder: Encoder,
    kind: str,
    folder: pathlib.Path | str,
    vectors: np.ndarray | None = None,
    dtype: str = "float32",
) -> DenseRetriever:
    """Encodes a corpus, writes the index and opens it. A build that was killed goes on.

    Args:
      corpus: at least one passage.
      encoder: e.g. `LexicalEncoder.fit(corpus.passages)` or `models.encoder.load_encoder(folder)`.
      kind: `exact` or `scann`.
      folder: made if missing; an index in it is replaced.
      vectors: floats [X, D] made before with this encoder (see `open_vectors`), instead of
        encoding.
      dtype: of the vectors on disk, and of an exact searcher's on its devices; see `DTYPES`.

    Raises:
      UserError: unknown kind or dtype, ScaNN missing, or vectors that do not fit.
    """
    one_of("index kind", kind, KINDS)
    one_of("index dtype", dtype, DTYPES)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # First gone, last written: what is there is whole.
    (folder / FILE).unlink(missing_ok=True)
    if vectors is None:
        made = [corpus.fingerprint, _identity(encoder.describe()), dtype]
        of = json.dumps(made, sort_keys=True)
        embed(corpus.passages, encoder, folder / "vectors", of, dtype)
    else:
        write_vectors(_checked(vectors, corpus, encoder), folder / "vectors", dtype)
    encoder.save(folder / "encoder")
    if kind == "scann":
        build_scann(read_vectors(folder / "vectors"), folder / "scann")
    retriever = DenseRetriever(corpus, encoder, _searcher(kind, folder, len(corpus)))
    _write_description(folder, retriever, kind, dtype)
    (folder / "vectors" / PROGRESS).unlink(missing_ok=True)
    return retriever


def _write_description(
    folder: pathlib.Path, retriever: DenseRetriever, kind: str, dtype: str
) -> None:
    description = {
        "corpus": retriever.fingerprint,
        "encoder": retriever.encoder.describe(),
        "kind": kind,
        "dimension": retriever.encoder.dimension,
        "count": len(retriever.corpus),
        "dtype": dtype,
    }
    write_json(folder / FILE, description)


def read_description(folder: pathlib.Path | str) -> dict[str, Any]:
    """`index.json` of an index folder.

    Raises:
      UserError: the folder holds no index.
    """
    path = pathlib.Path(folder) / FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds no whole index ({FILE}): run 'ragrl index' first"
        ) from error


def _reload(description: dict[str, Any], folder: pathlib.Path) -> Encoder:
    """The encoder an index was made with."""
    if description["kind"] == "lexical":
        return LexicalEncoder.load(folder / "encoder")
    return from_description(description)


def _identity(description: dict[str, Any]) -> dict[str, Any]:
    """A description without the place a model was read from: it may move."""
    return {name: value for name, value in description.items() if name != "source"}


def open_index(
    folder: pathlib.Path | str, corpus: Corpus, encoder: Encoder | None = None
) -> DenseRetriever:
    """Opens an index over the corpus it was made for.

    Args:
      folder: written by `build_index`.
      corpus: the same passages in the same order.
      encoder: None loads the one named in the index; otherwise it must be that one.

    Raises:
      UserError: no index, another corpus (both fingerprints are named), another encoder.
    """
    folder = pathlib.Path(folder)
    made = read_description(folder)
    if made["corpus"] != corpus.fingerprint:
        raise UserError(
            f"index {folder} was built for corpus {made['corpus']}, but {corpus.fingerprint} is "
            "loaded: rerun 'ragrl index', or give the corpus it was built for"
        )
    encoder = _reload(made["encoder"], folder) if encoder is None else encoder
    if _identity(encoder.describe()) != _identity(made["encoder"]):
        raise UserError(
            f"index {folder} was built with the encoder {made['encoder']}, but "
            f"{encoder.describe()} is loaded: rerun 'ragrl index'"
        )
    return DenseRetriever(corpus, encoder, _searcher(made["kind"], folder, made["count"]))


def load_indexed(path: pathlib.Path, folder: pathlib.Path | None) -> Corpus:
    """The corpus of a file, its passages kept in the folder of an index that is there, or will be.

    Without a folder they are held in memory.

    Raises:
      UserError: as `load_corpus` does, or the index is of another corpus.
    """
    if folder is None:
        return load_corpus(path)
    of = read_description(folder)["corpus"] if (folder / FILE).exists() else ""
    return load_corpus(path, folder=folder / PASSAGES, of=of)


def make_encoder(name: str, corpus: Corpus, **prefixes: str | None) -> Encoder:
    """An encoder by name: `lexical`, `minilm`, or a local folder of a BERT-family model.

    `prefixes` are those of `models.encoder.load_encoder`.

    Raises:
      UserError: the folder holds no such model, or MiniLM's package is not installed.
    """
    if name != "lexical":
        return load_encoder(name, **prefixes)
    if any(prefixes.values()):
        raise UserError("the lexical encoder has no use for a prefix: leave it out")
    return LexicalEncoder.fit(corpus.passages)


def _with_gold(path: pathlib.Path | str | None, qrels: pathlib.Path | str | None) -> list[Question]:
    """The questions that recall is measured on; none where none are given."""
    if path is None:
        if qrels is not None:
            raise UserError(f"--qrels {qrels} judges passages of questions: give --questions too")
        return []
    questions = load_questions(path)
    if qrels is not None:
        return judged(questions, qrels)
    if gold := [question for question in questions if question.gold]:
        return gold
    raise UserError(
        f"{path} names no gold passages, which recall is measured by: give --qrels, or leave "
        "--questions out"
    )


def run_index(
    corpus_path: pathlib.Path | str,
    out: pathlib.Path | str,
    encoder: str = "lexical",
    kind: str = "exact",
    questions_path: pathlib.Path | str | None = None,
    vectors_path: pathlib.Path | str | None = None,
    dtype: str = "float32",
    qrels_path: pathlib.Path | str | None = None,
    **prefixes: str | None,
) -> dict[str, Any]:
    """Builds an index from a file: the whole of `ragrl index`.

    Args:
      corpus_path: passages in any known format.
      out: the index folder.
      encoder: see `make_encoder`.
      kind: `exact` or `scann`.
      questions_path: questions in any known format; recall is measured on those with gold.
      vectors_path: a file of the passages' vectors, made before with this encoder.
      dtype: of the vectors, see `build_index`.
      qrels_path: judgements of TREC or BEIR, in the place of the questions' own gold.
      prefixes: see `make_encoder`.

    Returns:
      A JSON-able report: corpus, encoder, kind, count, dimension, seconds (encoding and building),
      and with questions `recall@2`, `recall@5`, `recall@10` and of how many they are means.

    Raises:
      UserError: anything given that cannot be used.
    """
    one_of("index kind", kind, KINDS)
    one_of("index dtype", dtype, DTYPES)
    # Read before the long work, so that a wrong path fails at once.
    questions = _with_gold(questions_path, qrels_path)
    vectors = None if vectors_path is None else open_vectors(vectors_path)
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass  # a folder that may not be written is refused before a corpus fills the memory
    corpus = load_corpus(corpus_path, folder=out / PASSAGES)
    start = time.perf_counter()
    made = make_encoder(encoder, corpus, **prefixes)
    retriever = build_index(corpus, made, kind, out, vectors, dtype)
    seconds = round(time.perf_counter() - start, 2)
    measured = recall(retriever, questions) if questions else {}
    return {
        "corpus": corpus.fingerprint,
        "encoder": encoder,
        "kind": kind,
        "count": len(corpus),
        "dimension": retriever.encoder.dimension,
        "seconds": seconds,
        **({"questions": len(questions)} if questions else {}),
        **measured,
    }
