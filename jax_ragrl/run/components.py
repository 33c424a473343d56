"""From a job to the parts of a run: world or files, index, language models, policies."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.config.schema import local
from jax_ragrl.corpus import world as worlds
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.questions import load_mixture
from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM, NoLLM
from jax_ragrl.llm.executors import WorldExecutors
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.models.by_name import resolve_model
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.int8 import quantize_decoder
from jax_ragrl.models.lora import add_lora
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.index import FILE as INDEX_FILE
from jax_ragrl.retrieval.index import (
    KINDS,
    build_index,
    load_indexed,
    make_encoder,
    open_index,
    read_description,
)
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.retrieval.web import WebRetriever
from jax_ragrl.rollout.collect import ActionSampler, Environment
from jax_ragrl.run.config import LLM, REMOTE, REPLY, Data, Index, Job
from jax_ragrl.runtime.multihost import in_turn
from jax_ragrl.runtime.sharding import make_mesh, own_mesh
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question


class Parts(NamedTuple):
    """What a run acts on; `policies` are decoders by name, as they are before training."""

    questions: Mapping[str, tuple[Question, ...]]
    retriever: Retriever
    llm: FrozenLLM
    policies: Mapping[str, Decoder]
    tokenizer: ChatTokenizer
    judge: FrozenLLM | None = None

    def models(self) -> dict[str, tuple[Any, Any]]:
        """The policies as a sampler takes them, see `for_sampling`."""
        return for_sampling(self.policies)

    def environment(self, sampler: ActionSampler) -> Environment:
        """What a rollout acts on, with calls measured in the policy's tokens."""
        return Environment(sampler, self.retriever, self.llm, self.tokenizer.count, self.judge)


def assemble(job: Job, workdir: pathlib.Path) -> Parts:
    """Everything a run acts on; the index is made in the work folder unless it is there."""
    data, mesh = load_data(job.data, index_folder(job.index, workdir)), mesh_for(job)
    policies, tokenizer = load_policies(job, mesh)
    return surrounded(job, workdir, data, mesh, tokenizer)._replace(policies=policies)


def surrounded(
    job: Job, workdir: pathlib.Path, data: Loaded, mesh: Mesh | None, tokenizer: ChatTokenizer
) -> Parts:
    """What a run acts on but its policies, around the tokenizer that they share."""
    corpus, questions, world = data
    retriever = in_turn(lambda: load_retriever(corpus, job.index, workdir))
    on = (world, job.recipe.system.style, job.shapes, own_mesh(mesh))
    judge = load_llm(job.judge, *on) if job.judge.kind != "none" else None
    return Parts(questions, retriever, load_llm(job.llm, *on), {}, tokenizer, judge)


def mesh_for(job: Job) -> Mesh | None:
    """The mesh that a run lies on; None: the first device. Several hosts need one."""
    if not job.mesh and jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes train one policy, but this config has no mesh: give "
            'one over all devices, such as --config.mesh="(1,-1,1)"'
        )
    return make_mesh(job.mesh) if job.mesh else None


def load_policies(
    job: Job, mesh: Mesh | None, dtype: str = ""
) -> tuple[dict[str, Decoder], ChatTokenizer]:
    """Every policy of the system, laid out over a mesh, and the tokenizer that they share.

    Its weights are kept in `dtype`; by default in float32 where they are trained, and below an
    adapter, where they are not, in that of the run's passes: a sampler then needs no copy.
    """
    names = sorted(set(job.policy_of.values()))
    folders = dict.fromkeys(names, job.policy) | dict(job.policies)
    if unknown := sorted(set(folders) - set(names)):
        known = ", ".join(dict.fromkeys([*names, *job.policy_of]))
        raise UserError(f"policies names {unknown[0]!r}: this system has {known}")
    dtype = dtype or ("float32" if job.lora is None else job.compute)
    loaded = {folder: load_policy(folder, mesh, dtype) for folder in sorted(set(folders.values()))}
    for policy, _ in loaded.values():
        policy.config = dataclasses.replace(policy.config, attention_impl=job.attention)
    tokenizers = {tuple(sorted(t.vocabulary().items())) for _, t in loaded.values()}
    if len(tokenizers) > 1:
        raise UserError(
            f"policies {sorted(loaded)} have different tokenizers: a run needs one vocabulary"
        )
    policies = {name: loaded[folder][0] for name, folder in folders.items()}
    if job.lora is not None:
        policies = {
            name: add_lora(policy, job.lora, rngs=nnx.Rngs(job.seed + i))
            for i, (name, policy) in enumerate(policies.items())
        }
    return policies, loaded[folders[names[0]]][1]


class Loaded(NamedTuple):
    """What is known and asked, and where it comes from if it is generated."""

    corpus: Corpus
    questions: Mapping[str, tuple[Question, ...]]
    world: worlds.World | None


def load_data(data: Data, folder: pathlib.Path | None = None) -> Loaded:
    """Corpus, questions by split, and the world where the data are generated.

    `folder` is that of the index, where the passages of a file are kept; None holds them in memory.
    """
    if data.files is not None:
        files = data.files
        splits = {
            "train": tuple(load_mixture(files.train, files.train_each)),
            "dev": tuple(load_mixture(files.dev)),
            "test": tuple(load_mixture(files.test)),
        }
        if not files.corpus:
            return Loaded(Corpus(()), splits, None)
        path = local(files.corpus)
        return Loaded(in_turn(lambda: load_indexed(path, folder)), splits, None)
    if data.world is None:
        raise UserError("there is nothing to ask: give data.files, or data.world")
    chosen = data.world
    world = worlds.generate(chosen.seed, chosen.size, famous=chosen.famous, hops=chosen.hops)
    return Loaded(Corpus(world.passages), world.questions, world)


def index_folder(index: Index, workdir: pathlib.Path) -> pathlib.Path:
    """Where the index of a run is, or will be."""
    return pathlib.Path(index.folder or workdir / "index")


def load_retriever(corpus: Corpus, index: Index, workdir: pathlib.Path) -> Retriever:
    """The retriever of a run: a server asked, or an index of its corpus."""
    if index.kind not in KINDS:
        return served(index, index_folder(index, workdir))
    if not len(corpus):
        raise UserError(
            f"there is no corpus for an index of kind {index.kind!r}: name data.files.corpus, or "
            "set index.kind to remote and index.url"
        )
    return open_or_build_index(corpus, index, workdir)


def served(index: Index, folder: pathlib.Path | None) -> Retriever:
    """A server as the retriever; what a search engine of the web finds is kept in `folder`."""
    patience: dict[str, Any] = {"retries": index.retries, "timeout": index.timeout}
    if index.kind == REMOTE:
        return RemoteRetriever(index.url, **patience)
    return WebRetriever(index.kind, index.url, folder, writer=jax.process_index(), **patience)


def open_or_build_index(corpus: Corpus, index: Index, workdir: pathlib.Path) -> DenseRetriever:
    """The retriever of a corpus: an index opened, or made first.

    Raises `UserError` where the index that is there is of another kind, dtype or encoder. (A
    folder of an encoder may have moved: whether it is the same is not seen from its name.)
    """
    folder = index_folder(index, workdir)
    if not (folder / INDEX_FILE).exists():
        encoder = make_encoder(index.encoder, corpus)
        return build_index(corpus, encoder, index.kind, folder, dtype=index.dtype)
    made = read_description(folder)
    encoder = made["encoder"].get("source", made["encoder"]["kind"])
    known = {encoder, index.encoder} & {"lexical", "minilm"}
    form, asked = (made["kind"], made.get("dtype", "float32")), (index.kind, index.dtype)
    if form != asked or (known and encoder != index.encoder):
        raise UserError(
            f"index {folder} is of kind {form[0]}, in {form[1]}, with the encoder {encoder}, but "
            f"index.kind is {index.kind}, index.dtype {index.dtype} and index.encoder "
            f"{index.encoder}: give these, or another folder"
        )
    return open_index(folder, corpus)


def policy_folder(name: str, *, weights: bool = True) -> pathlib.Path:
    """The folder of a model by its name, see `resolve_model`.

    All processes call it together: the first one downloads or converts what is not there yet.
    """
    return in_turn(lambda: resolve_model(name, weights=weights))


def load_policy(
    name: str, mesh: Mesh | None = None, dtype: str = "float32"
) -> tuple[Decoder, ChatTokenizer]:
    """A decoder and its tokenizer by the name of the model, over a mesh or on one device."""
    folder = policy_folder(name)
    return load_decoder(folder, mesh, dtype), ChatTokenizer.load(folder)


def load_llm(
    llm: LLM,
    world: worlds.World | None,
    style: str,
    shapes: Shapes,
    mesh: Mesh | None = None,
) -> FrozenLLM:
    """The frozen language model of a run; a local one lies on a mesh of this process's devices."""
    if llm.kind == "none":
        return NoLLM()
    if llm.kind == "openai":
        return OpenAILLM(
            llm.model,
            llm.base_url,
            concurrency=llm.concurrency,
            retries=llm.retries,
            timeout=llm.timeout,
            extra=llm.extra,
        )
    if llm.kind == "local":
        decoder, tokenizer = load_policy(llm.model, mesh, llm.dtype)
        decoder = quantize_decoder(decoder) if llm.int8 else decoder
        graph, params = nnx.split(decoder, nnx.Param)
        shapes = dataclasses.replace(shapes, steps=max(shapes.steps, REPLY))
        return LocalLLM(graph, params, tokenizer, shapes, f"local {llm.model}")
    if world is None:
        raise UserError(
            "llm.kind world_reader reads generated worlds only: use local or openai, or none for a "
            "system that asks no frozen model"
        )
    return WorldExecutors(
        world, style=style, limit=llm.documents, noise=llm.noise, confusion=llm.confusion
    )
