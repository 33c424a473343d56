"""Index folders of every kind: the kinds that `retrieval.index` does not build, and opening any."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.schema import build, one_of
from jax_ragrl.corpus.duplicates import report_duplicates
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import AS_IS, Reading
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.bm25 import build_bm25, open_bm25
from jax_ragrl.retrieval.description import FILE, read_description
from jax_ragrl.retrieval.index import open_index, read_corpus, with_gold
from jax_ragrl.retrieval.kinds import KINDS, LISTWISE, BM25Index, PipelineIndex
from jax_ragrl.retrieval.recall import describe_quality
from jax_ragrl.run.data import section_units
from jax_ragrl.run.index import load_retriever
from jax_ragrl.run.pipeline import (
    LoadLLM,
    describe_pipeline,
    local_parts,
    pipeline_of,
    with_stored_encoders,
)
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import is_process_zero, on_process_zero, process_zero_first


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


def section_of(options: Mapping[str, Any]) -> BM25Index | PipelineIndex | None:
    """Returns the section that the options of `ragrl data index` describe; None for vectors.

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
    choices = {name: options[name] for name in SETTINGS if options[name]}
    if "retrievers" in choices:
        choices["retrievers"] = tuple(choices["retrievers"].split(","))
    section = {BM25Index.kind: BM25Index, PipelineIndex.kind: PipelineIndex}.get(kind)
    values = {"kind": kind, "folder": str(options["out"]), **choices}
    return build(section, values, "index") if section else None


# The kinds that read an option.
READERS = {
    **dict.fromkeys(("encoder", "vectors", "dtype", "query_prefix", "passage_prefix"), KINDS),
    "recall": ("scann",),
    "language": (BM25Index.kind,),
    **dict.fromkeys(("retrievers", "fuse", "rerank", "candidates"), (PipelineIndex.kind,)),
}
SETTINGS = ("language", "retrievers", "fuse", "rerank", "candidates")


def build_folder(
    index: BM25Index | PipelineIndex,
    corpus_path: pathlib.Path | str,
    questions_path: pathlib.Path | str | None = None,
    qrels_path: pathlib.Path | str | None = None,
    *,
    reading: Reading = AS_IS,
) -> dict[str, Any]:
    """Builds an index of words or a pipeline from a file; implements `ragrl data index`.

    The arguments are those of `retrieval.index.run_index`; the units of `reading` become those of
    the index. Returns a report for JSON: corpus, count, kind and its settings, seconds (of
    building), `duplicates`, and the same measures.
    """
    questions = with_gold(questions_path, qrels_path, reading.fields)
    is_listwise = isinstance(index, PipelineIndex) and index.rerank == LISTWISE
    if is_listwise and questions:
        raise UserError(
            "recall after the reranker 'llm' needs the language model of a run: leave out "
            "--questions, or --rerank"
        )
    folder = pathlib.Path(index.folder)
    corpus = process_zero_first(
        lambda: read_corpus(corpus_path, folder, reading, lambda: section_units(index))
    )
    start = time.perf_counter()
    retriever = build_section(corpus, index, folder)
    seconds = round(time.perf_counter() - start, 2)
    return {
        **read_description(folder),
        "seconds": seconds,
        "duplicates": report_duplicates(corpus),
        **describe_quality(retriever, questions, corpus),
    }


def build_section(
    corpus: Corpus, index: BM25Index | PipelineIndex, folder: pathlib.Path
) -> Retriever:
    """Builds an index of words or a pipeline in a folder, and opens it; a collective."""
    if isinstance(index, BM25Index):
        return process_zero_first(
            lambda: (
                build_bm25(corpus, index, folder)
                if is_process_zero()
                else open_bm25(folder, corpus)
            )
        )
    if not local_parts(index):
        raise UserError(
            f"every retriever of {index.retrievers} is a server: there is no index to build; set "
            "config.index in the config of a run"
        )
    # Removed first and written last, so that its presence proves that the index is complete.
    on_process_zero(lambda: (folder / FILE).unlink(missing_ok=True))
    rerank = "" if index.rerank == LISTWISE else index.rerank
    retriever = load_retriever(corpus, dataclasses.replace(index, rerank=rerank), folder)
    facts = {"corpus": corpus.fingerprint, "count": len(corpus)}
    on_process_zero(lambda: write_json(folder / FILE, {**facts, **describe_pipeline(index)}))
    return retriever
