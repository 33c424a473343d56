"""Index folders of every kind: `ragrl data index` builds them, and any can be opened."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_ragrl.config.schema import convert, one_of
from jax_ragrl.corpus.duplicates import report_duplicates
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import AS_IS, Reading
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.bm25 import open_bm25
from jax_ragrl.retrieval.description import FILE, read_description
from jax_ragrl.retrieval.index import open_index, read_corpus, with_gold
from jax_ragrl.retrieval.kinds import (
    KINDS,
    LISTWISE,
    BM25Index,
    Index,
    PipelineIndex,
    VectorIndex,
)
from jax_ragrl.retrieval.recall import describe_quality
from jax_ragrl.retrieval.vectors import open_vectors
from jax_ragrl.run.data import section_units
from jax_ragrl.run.index import build_vectors, load_retriever
from jax_ragrl.run.pipeline import (
    LoadLLM,
    describe_pipeline,
    local_parts,
    pipeline_of,
    with_stored_encoders,
)
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import on_process_zero, process_zero_first


def open_folder(
    folder: pathlib.Path | str, corpus: Corpus, llm: LoadLLM | None = None
) -> Retriever:
    """Opens an index of any kind; `UserError` if there is none, or it has another corpus.

    `llm` loads the frozen language model, for a pipeline that it reranks.
    """
    folder = pathlib.Path(folder)
    description = read_description(folder)
    if description["kind"] == BM25Index.kind:
        return open_bm25(folder, corpus)
    if description["kind"] == PipelineIndex.kind:
        index = with_stored_encoders(pipeline_of(description, folder), folder)
        return load_retriever(corpus, index, folder, llm)
    return open_index(folder, corpus)


BuiltIndex = VectorIndex | BM25Index | PipelineIndex  # of which `ragrl data index` builds a folder
# The kinds that read an option.
READERS = {
    **dict.fromkeys(("encoder", "vectors", "dtype", "query_prefix", "passage_prefix"), KINDS),
    "recall": ("scann",),
    "language": (BM25Index.kind,),
    **dict.fromkeys(("retrievers", "fuse", "rerank", "candidates"), (PipelineIndex.kind,)),
}
NO_SETTINGS = ("vectors", "query_prefix", "passage_prefix")  # which a config does not have


def section_of(options: Mapping[str, Any]) -> BuiltIndex:
    """Returns the section that the options of `ragrl data index` describe.

    `UserError` if the kind is unknown, or does not read an option.
    """
    if not (kind := options["kind"]):
        # An encoder needs vectors, and its absence words.
        kind = "scann" if options["encoder"] or options["vectors"] else BM25Index.kind
        kind = PipelineIndex.kind if options["retrievers"] or options["rerank"] else kind
    one_of("index kind", kind, (BM25Index.kind, *KINDS, PipelineIndex.kind))
    for name, kinds in READERS.items():
        if options.get(name) and kind not in kinds:
            raise UserError(
                f"--{name.replace('_', '-')} is {options[name]}, but --kind is {kind}, and only "
                f"{' or '.join(kinds)} reads this option: leave it out, or change the kind"
            )
    choices = {name: options[name] for name in READERS if options[name] and name not in NO_SETTINGS}
    if "retrievers" in choices:
        choices["retrievers"] = tuple(choices["retrievers"].split(","))
    section: BuiltIndex = convert(
        Index, {"kind": kind, "folder": str(options["out"]), **choices}, "index"
    )
    return section


def build_folder(
    index: BuiltIndex,
    corpus_path: pathlib.Path | str,
    questions_path: pathlib.Path | str | None = None,
    qrels_path: pathlib.Path | str | None = None,
    *,
    vectors_path: pathlib.Path | str | None = None,
    reading: Reading = AS_IS,
    **prefixes: str | None,
) -> dict[str, Any]:
    """Builds an index, which has a folder, from a file; implements `ragrl data index`.

    Args:
      index: the section; its units become those of `reading`.
      corpus_path: a file or folder of passages.
      questions_path: questions on which the index is measured.
      qrels_path: relevance judgments (TREC or BEIR), which replace the questions' own gold.
      vectors_path: vectors that the encoder computed before, see `open_vectors`.
      reading: how the passages are read.
      prefixes: as in `models.encoder.load_encoder`.

    Returns:
      A report for JSON: the content of `index.json` with the name of the encoder, `seconds`
      (encoding and building), `duplicates`, and the measures of `describe_quality`.
    """
    questions = with_gold(questions_path, qrels_path, reading.fields)
    is_listwise = isinstance(index, PipelineIndex) and index.rerank == LISTWISE
    if is_listwise and questions:
        raise UserError(
            "recall after the reranker 'llm' needs the language model of a run: leave out "
            "--questions, or --rerank"
        )
    vectors = None if vectors_path is None else open_vectors(vectors_path)
    folder = pathlib.Path(index.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass  # fail now if the folder is not writable, before the corpus is read
    corpus = process_zero_first(
        lambda: read_corpus(corpus_path, folder, reading, lambda: section_units(index))
    )
    start = time.perf_counter()
    retriever = build_section(corpus, index, folder, vectors, **prefixes)
    seconds = round(time.perf_counter() - start, 2)
    return {
        **read_description(folder),
        **({"encoder": index.encoder} if isinstance(index, VectorIndex) else {}),
        "seconds": seconds,
        "duplicates": report_duplicates(corpus),
        **describe_quality(retriever, questions, corpus),
    }


def build_section(
    corpus: Corpus,
    index: BuiltIndex,
    folder: pathlib.Path,
    vectors: np.ndarray | None = None,
    **prefixes: str | None,
) -> Retriever:
    """Builds an index in a folder, in place of one that it has, and opens it; a collective."""
    if isinstance(index, PipelineIndex) and not local_parts(index):
        raise UserError(
            f"every retriever of {index.retrievers} is a server: there is no index to build; set "
            "config.index in the config of a run"
        )
    # Removed first and written last, so that its presence proves that the index is complete.
    on_process_zero(lambda: (folder / FILE).unlink(missing_ok=True))
    if isinstance(index, VectorIndex):
        return build_vectors(corpus, index, folder, vectors, **prefixes)
    if isinstance(index, BM25Index):
        return load_retriever(corpus, dataclasses.replace(index, folder=str(folder)), folder)
    rerank = "" if index.rerank == LISTWISE else index.rerank
    retriever = load_retriever(corpus, dataclasses.replace(index, rerank=rerank), folder)
    facts = {"corpus": corpus.fingerprint, "count": len(corpus)}
    on_process_zero(lambda: write_json(folder / FILE, {**facts, **describe_pipeline(index)}))
    return retriever
