"""The retriever of a run: opens its index, or builds it first."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_ragrl.config.functions import imported
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.models.encoder import MINILM
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.bm25 import open_or_build_bm25
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.description import FILE as INDEX_FILE
from jax_ragrl.retrieval.description import encoder_source, read_description
from jax_ragrl.retrieval.embed import Encoder
from jax_ragrl.retrieval.index import build_index, folder_of, make_encoder, open_index
from jax_ragrl.retrieval.kinds import (
    HASHED_WORDS,
    BM25Index,
    Index,
    OwnIndex,
    PipelineIndex,
    RemoteIndex,
    ServerIndex,
    VectorIndex,
)
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.retrieval.web import WebRetriever
from jax_ragrl.run.lock import lock_unless_done, unlock_folder
from jax_ragrl.run.pipeline import LoadLLM, build_pipeline
from jax_ragrl.runtime.multihost import is_process_zero, on_process_zero, process_zero_first

BUILTIN = {HASHED_WORDS, MINILM}


def corpus_folder(corpus: Corpus, index: Index, workdir: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the index of a corpus, which a second corpus has for itself."""
    folder = index_folder(index, workdir)
    return folder_of(folder, corpus.fingerprint) if len(corpus) else folder


def index_folder(index: Index, workdir: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the index of a run, which need not exist yet."""
    # A search server stores its own index; web search stores a cache of results.
    folder = "" if isinstance(index, RemoteIndex | OwnIndex) else index.folder
    return pathlib.Path(folder or workdir / "index")


def load_retriever(
    corpus: Corpus, index: Index, workdir: pathlib.Path, llm: LoadLLM | None = None
) -> Retriever:
    """Builds the retriever of a run: a client of a server, an index of the corpus, or several.

    A collective: the processes of a run build an index of vectors together, and the first one an
    index of words. Of several runs that share a folder one builds its index, and the others wait.
    `workdir` holds the index unless the config names another folder; `llm` loads the frozen
    language model, for a pipeline that it reranks.
    """
    folder = corpus_folder(corpus, index, workdir)
    if isinstance(index, PipelineIndex):
        load = functools.partial(load_retriever, corpus, workdir=workdir)
        return build_pipeline(index, folder, load, llm)
    if isinstance(index, OwnIndex):
        own: Retriever = imported("index.retriever", index.retriever)(corpus)
        return own
    if not isinstance(index, VectorIndex | BM25Index):
        return server_retriever(index, folder)
    if not len(corpus):
        raise UserError(
            f"there is no corpus for an index of kind {index.kind!r}: name data.files.corpus, or "
            "set index.kind to remote and index.url"
        )
    with _one_builder(folder):
        if isinstance(index, VectorIndex):
            return open_or_build_index(corpus, index, workdir)
        # The first process decides: another host, which may not see the new files yet, would write
        # them again below the searches of the first one.
        return process_zero_first(
            lambda: open_or_build_bm25(corpus, index, folder, may_build=is_process_zero())
        )


@contextlib.contextmanager
def _one_builder(folder: pathlib.Path) -> Iterator[None]:
    """Locks the folder of an index that must be built, not a read-only one; a collective."""
    # A command that holds the lock already, such as `ragrl data index`, keeps it afterwards.
    is_new_lock = on_process_zero(lambda: lock_unless_done(folder, folder / INDEX_FILE))
    try:
        yield
    finally:
        if is_new_lock and is_process_zero():
            unlock_folder(folder)


def server_retriever(index: ServerIndex, folder: pathlib.Path | None) -> Retriever:
    """Builds the client of a search server; `folder` caches the results of a web search engine."""
    patience: dict[str, Any] = {"retries": index.retries, "timeout": index.timeout}
    if isinstance(index, RemoteIndex):
        return RemoteRetriever(index.url, **patience)
    # Each process caches results in its own file: several writers would corrupt one.
    return WebRetriever(index.kind, index.url, folder, writer=jax.process_index(), **patience)


def open_or_build_index(
    corpus: Corpus, index: VectorIndex, workdir: pathlib.Path
) -> DenseRetriever:
    """Opens the index of a corpus, or builds it; `UserError` if it has other settings."""
    folder = process_zero_first(lambda: corpus_folder(corpus, index, workdir))
    if not on_process_zero((folder / INDEX_FILE).exists):
        return build_vectors(corpus, index, folder)
    check_index_settings(index, folder)
    return process_zero_first(
        lambda: open_index(folder, corpus, _config_encoder(index, folder, corpus))
    )


def build_vectors(
    corpus: Corpus,
    index: VectorIndex,
    folder: pathlib.Path,
    vectors: np.ndarray | None = None,
    **prefixes: str | None,
) -> DenseRetriever:
    """Builds the index of a section; `vectors` as in `build_index`, others as in `load_encoder`."""
    encoder = process_zero_first(lambda: make_encoder(index.encoder, corpus, **prefixes))
    return build_index(corpus, encoder, index.kind, folder, vectors, index.dtype, index.recall)


def _config_encoder(index: VectorIndex, folder: pathlib.Path, corpus: Corpus) -> Encoder | None:
    """Returns the encoder of a config; None if an index has the same one, by its name or folder."""
    if not has_other_source(index, folder):
        return None
    description = read_description(folder)["encoder"]
    # A config has no prefixes, and the index may have been built with others than the model's.
    names = ("query_prefix", "passage_prefix")
    prefixes = {name: description[name] for name in names if name in description}
    return make_encoder(index.encoder, corpus, **prefixes)


def has_other_source(index: VectorIndex, folder: pathlib.Path) -> bool:
    """Whether a config names another encoder than the index in a folder, perhaps a moved copy."""
    path = pathlib.Path(index.encoder)
    # As `load_encoder` describes its source: a built-in encoder is a name in any folder.
    is_folder = index.encoder not in BUILTIN and path.is_dir()
    return encoder_source(read_description(folder)) != (
        str(path.absolute()) if is_folder else index.encoder
    )


def check_index_settings(index: VectorIndex, folder: pathlib.Path) -> None:
    """Raises `UserError` if the index in a folder was built with other settings."""
    description = read_description(folder)
    kind, dtype = description["kind"], description.get("dtype", "float32")
    encoder = encoder_source(description)
    # Folders are not compared here, but `open_index` compares their encoders: one may have moved.
    is_builtin = {encoder, index.encoder} & BUILTIN
    if (kind, dtype) != (index.kind, index.dtype) or (is_builtin and encoder != index.encoder):
        raise UserError(
            f"index {folder} is of kind {kind}, in {dtype}, with the encoder {encoder}, but "
            f"index.kind is {index.kind}, index.dtype {index.dtype} and index.encoder "
            f"{index.encoder}: use the same settings, or another folder"
        )
    target = description.get("search", {}).get("target", 0)
    if index.recall and index.recall != target:
        raise UserError(
            f"index {folder} was tuned for the recall {target} (0: not tuned), but index.recall is "
            f"{index.recall}: leave it out, or build the index again in another folder"
        )
