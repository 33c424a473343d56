"""Builds the pipeline of a config: retrievers, fusion of their hits, a reranker."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.llm.listwise import ListwiseReranker
from jax_ragrl.models.safetensors_io import weights_checksum
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.description import (
    FILE,
    encoder_checksum,
    encoder_source,
    read_description,
)
from jax_ragrl.retrieval.fuse import FusedRetriever
from jax_ragrl.retrieval.kinds import (
    LISTWISE,
    BM25Index,
    PipelineIndex,
    RemoteIndex,
    SingleIndex,
    VectorIndex,
)
from jax_ragrl.retrieval.rerank import RerankedRetriever, Reranker, load_cross_encoder
from jax_ragrl.run.models import policy_folder
from jax_ragrl.runtime.multihost import process_zero_first

# A call, because a local model is loaded only if it is needed.
LoadLLM = Callable[[], FrozenLLM]


def build_pipeline(
    index: PipelineIndex,
    folder: pathlib.Path,
    load: Callable[[SingleIndex], Retriever],
    llm: LoadLLM | None = None,
) -> Retriever:
    """Builds the retrievers of a pipeline, by `load`, and its stages.

    `folder` holds one folder per retriever, unless its section names another one; `llm` loads the
    frozen language model, which a listwise reranker needs.
    """
    retrievers = tuple(load(part) for part in placed_sections(index, folder))
    weights = index.weights or (1.0,) * len(retrievers)
    retriever = retrievers[0]
    # A single retriever keeps its scores, and its hits beyond the candidates.
    if len(retrievers) > 1:
        retriever = FusedRetriever(retrievers, weights, index.fuse, index.candidates)
    if not index.rerank:
        return retriever
    reranker: Reranker
    if index.rerank != LISTWISE:
        reranker = process_zero_first(lambda: load_cross_encoder(index.rerank))
    elif llm is not None:
        reranker = ListwiseReranker(llm())
    else:
        raise UserError(
            f"index.rerank is {LISTWISE!r}, but this command has no frozen language model: name a "
            "cross-encoder, or leave the key empty"
        )
    return RerankedRetriever(retriever, reranker, index.candidates)


def placed_sections(index: PipelineIndex, folder: pathlib.Path) -> Iterator[SingleIndex]:
    """Yields the retrievers of a pipeline, each with its own folder."""
    names: set[str] = set()
    for part in index.sections:
        if isinstance(part, RemoteIndex) or part.folder:
            yield part
            continue
        # Such as `bm25` or `scann-minilm`, and `bm25-2` for a second one.
        name = str(part.kind)
        if isinstance(part, VectorIndex):
            name += "-" + re.sub(r"[^\w.-]+", "-", pathlib.Path(part.encoder).name)
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        name = next(x for x in itertools.chain([name], numbered) if x not in names)
        names.add(name)
        yield dataclasses.replace(part, folder=str(folder / name))


def describe_pipeline(index: PipelineIndex) -> dict[str, Any]:
    """Returns the settings of a pipeline for `index.json`, without its folder."""
    values = dataclasses.asdict(dataclasses.replace(index, retrievers=index.sections))
    del values["folder"]
    return values


def pipeline_of(description: Mapping[str, Any], folder: pathlib.Path) -> PipelineIndex:
    """Returns the pipeline of a folder from its `index.json`, see `describe_pipeline`."""
    names = [field.name for field in dataclasses.fields(PipelineIndex)]
    values = {name: description[name] for name in names if name in description}
    return build(PipelineIndex, values | {"folder": str(folder)}, "index")


def stored_models(description: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    """Returns checksums of the models of an index that its `index.json` names by path alone.

    These are the encoders and the reranker of a pipeline; an index of vectors has that of its own.
    """
    if description["kind"] != PipelineIndex.kind:
        return []
    index = pipeline_of(description, folder)
    parts = [part for part in placed_sections(index, folder) if isinstance(part, VectorIndex)]
    encoders = [encoder_checksum(read_description(part.folder)["encoder"]) for part in parts]
    is_model = index.rerank not in ("", LISTWISE)
    return encoders + ([weights_checksum(policy_folder(index.rerank))] if is_model else [])


def with_stored_encoders(index: PipelineIndex, folder: pathlib.Path) -> PipelineIndex:
    """Returns a pipeline with the encoders that its indexes name.

    An index names a folder by its absolute path, the pipeline as it was typed.
    """
    parts: list[SingleIndex] = []
    for part in placed_sections(index, folder):
        if isinstance(part, VectorIndex) and (pathlib.Path(part.folder) / FILE).exists():
            part = dataclasses.replace(part, encoder=encoder_source(read_description(part.folder)))
        parts.append(part)
    return dataclasses.replace(index, retrievers=tuple(parts))


def local_parts(index: PipelineIndex) -> list[VectorIndex | BM25Index]:
    """Returns the retrievers of a pipeline that are indexes on this machine."""
    return [part for part in index.sections if isinstance(part, VectorIndex | BM25Index)]
