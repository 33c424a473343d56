"""Retrievers outside of a run: of an index folder or of a config."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.schema import build, convert
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.description import read_description
from jax_ragrl.retrieval.index import load_indexed, stored_corpus
from jax_ragrl.retrieval.kinds import Index, ServerIndex
from jax_ragrl.run.config import Data
from jax_ragrl.run.data import load_data
from jax_ragrl.run.index import index_folder, load_retriever, server_retriever
from jax_ragrl.run.index_folder import open_folder as open_index_folder
from jax_ragrl.run.load import with_default_index
from jax_ragrl.run.pipeline import LoadLLM


def retriever_from(
    corpus: Corpus, section: Mapping[str, Any], workdir: pathlib.Path, llm: LoadLLM | None = None
) -> Retriever:
    """Opens or builds the retriever of a section `index`; arguments as in `load_retriever`."""
    return load_retriever(corpus, convert(Index, dict(section), "config.index"), workdir, llm)


def open_folder(folder: pathlib.Path, corpus: pathlib.Path | None = None) -> Retriever:
    """Opens the index of a folder, with the passages of a file or those that are stored with it."""
    read_description(folder)  # a folder without an index is an error before passages are read
    passages = stored_corpus(folder) if corpus is None else load_indexed(corpus, folder)
    return open_index_folder(folder, passages)


def open_config(values: Mapping[str, Any], workdir: pathlib.Path) -> Retriever:
    """Opens or builds the retriever of a config, of which it reads `data` and `index` alone."""
    values = with_default_index(values)
    index = convert(Index, values.get("index", {}), "config.index")
    if isinstance(index, ServerIndex):
        return server_retriever(index, index_folder(index, workdir))
    data = build(Data, values.get("data", {}), "config.data")
    corpus = load_data(data, index_folder(index, workdir), index).corpus
    return load_retriever(corpus, index, workdir)
