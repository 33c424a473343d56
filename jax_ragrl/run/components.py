"""The components of a run: data, index, language models and policies, built from its config."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.config.functions import imported
from jax_ragrl.corpus import world as worlds
from jax_ragrl.corpus.chunks import WORDS, Units
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.questions import load_mixture
from jax_ragrl.corpus.reading import AS_IS, Reading
from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM, NoLLM
from jax_ragrl.llm.cache import FILE as CACHE_FILE
from jax_ragrl.llm.executors import WorldExecutors
from jax_ragrl.llm.kinds import LLM, LocalLLMConfig, NoLLMConfig, OpenAIConfig
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.models.by_name import model_config, resolve_model
from jax_ragrl.models.chat import ChatFinding, compare_chat
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.encoder import MINILM
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.hf_config import from_hf
from jax_ragrl.models.int8 import quantize_decoder
from jax_ragrl.models.lora import add_lora
from jax_ragrl.models.split import SplitModel
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.bm25 import open_or_build_bm25
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.description import FILE as INDEX_FILE
from jax_ragrl.retrieval.description import encoder_source, read_description
from jax_ragrl.retrieval.embed import Encoder
from jax_ragrl.retrieval.index import (
    build_index,
    folder_of,
    load_indexed,
    make_encoder,
    open_index,
    units_of,
)
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
from jax_ragrl.retrieval.measures import example_names
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.retrieval.web import WebRetriever
from jax_ragrl.rollout.collect import ActionSampler, Environment
from jax_ragrl.rollout.policy import check_grammars
from jax_ragrl.run.config import REPLY, Data, Job
from jax_ragrl.run.lock import lock_unless_done, unlock_folder
from jax_ragrl.run.pipeline import LoadLLM, build_pipeline
from jax_ragrl.run.world_folder import make_world
from jax_ragrl.runtime.multihost import is_process_zero, on_process_zero, process_zero_first
from jax_ragrl.runtime.sharding import Rules, local_mesh, make_mesh
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import SAMPLING_RULES, for_sampling, without_fsdp
from jax_ragrl.text.prompts import conversations
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question


class Components(NamedTuple):
    """The components of a run.

    Fields:
      questions: the questions by split (`train`, `dev`, `test`).
      retriever: performs searches.
      llm: the frozen language model.
      policies: the decoders by the name of their policy, before training.
      tokenizer: the tokenizer of all policies.
      judge: a language model that grades answers, if the config has one.
    """

    questions: Mapping[str, tuple[Question, ...]]
    retriever: Retriever
    llm: FrozenLLM
    policies: Mapping[str, Decoder]
    tokenizer: ChatTokenizer
    judge: FrozenLLM | None = None

    def models(self) -> dict[str, SplitModel]:
        """Returns the policies in the form that samplers need, see `for_sampling`."""
        return for_sampling(self.policies)

    def environment(self, sampler: ActionSampler) -> Environment:
        """Returns the environment of rollouts, which measures calls in tokens of the policy."""
        return Environment(sampler, self.retriever, self.llm, self.tokenizer.count, self.judge)


def build_components(
    job: Job,
    workdir: pathlib.Path,
    *,
    questions: Mapping[str, tuple[Question, ...]] | None = None,
    retriever: Retriever | None = None,
    llm: FrozenLLM | None = None,
) -> Components:
    """Builds all components of a run; builds the index in the work folder if there is none.

    Args:
      job: the run.
      workdir: the folder of the run, which may hold the index.
      questions: questions by split (`train`, `dev`, `test`) instead of the config's.
      retriever: a retriever instead of the config's index.
      llm: a frozen language model instead of the config's.
    """
    if questions is not None and retriever is not None:
        data = LoadedData(Corpus(()), questions, None)  # the config's corpus is not needed
    else:
        data = load_data(job.data, index_folder(job.index, workdir), job.index)
        data = data._replace(questions=questions or data.questions)
    # Data before models: a wrong path fails before weights are loaded.
    mesh, load = mesh_for(job), shared_loader()
    policies, tokenizer = load_policies(job, mesh, load=load)
    rest = build_surroundings(job, workdir, data, mesh, tokenizer, retriever, llm, load)
    return rest._replace(policies=policies)


def build_surroundings(
    job: Job,
    workdir: pathlib.Path,
    data: LoadedData,
    mesh: Mesh | None,
    tokenizer: ChatTokenizer,
    retriever: Retriever | None = None,
    llm: FrozenLLM | None = None,
    load: PolicyLoader | None = None,
) -> Components:
    """Builds all components of a run but its policies.

    Args:
      job: the run.
      workdir: the folder of the run, which may hold the index.
      data: corpus and questions.
      mesh: the mesh of the run, or None.
      tokenizer: the tokenizer of all policies.
      retriever: a retriever instead of the config's index.
      llm: a frozen language model instead of the config's.
      load: loads models; by default a new `shared_loader`.
    """
    corpus, questions, world = data
    load_frozen = _frozen_loader(job, workdir, world, mesh, load or shared_loader())
    language_model = load_frozen(job.llm) if llm is None else llm
    if retriever is None:
        retriever = load_retriever(corpus, job.index, workdir, lambda: language_model)
    return Components(
        questions=questions,
        retriever=retriever,
        llm=language_model,
        policies={},
        tokenizer=tokenizer,
        # Without a judge the rewards use the metric of the recipe.
        judge=load_frozen(job.judge) if job.judge.kind != "none" else None,
    )


def _frozen_loader(
    job: Job,
    workdir: pathlib.Path,
    world: worlds.World | None,
    mesh: Mesh | None,
    load: PolicyLoader,
) -> Callable[[Any], FrozenLLM]:
    """Returns the function that loads a frozen language model of a run from its config."""
    # Each process answers the requests of its questions, on its local devices.
    return functools.partial(
        load_llm,
        world=world,
        style=job.recipe.system.style,
        shapes=job.shapes,
        mesh=local_mesh(mesh),
        load=load,
        cache=reply_cache(workdir),
    )


def reply_cache(folder: pathlib.Path) -> pathlib.Path:
    """Returns the file of cached replies in a folder.

    Each process of a run has its own: hosts may share the folder over a network, and a file system
    there may have no locks.
    """
    process = jax.process_index()
    return folder / (f"{process}-{CACHE_FILE}" if process else CACHE_FILE)


def mesh_for(job: Job) -> Mesh | None:
    """Returns the mesh of a run; None: the first device. A run on several hosts needs a mesh."""
    if not job.mesh and jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes train one policy, but this config has no mesh: set "
            'one over all devices, such as --config.mesh="(-1,-1,1)"'
        )
    return mesh_of_shape(job.mesh, [job.policy, *dict(job.policies).values()])


def mesh_of_shape(shape: tuple[int, ...], policies: Sequence[str]) -> Mesh | None:
    """Returns a mesh; None for an empty shape.

    Args:
      shape: as in the config of a run.
      policies: the names of the models on the mesh; read if the shape depends on their width.
    """
    if not shape:
        return None
    width = 0
    if shape[:2] == (-1, -1):
        # The narrowest model, which is the first to have no columns left for another device.
        folders = [policy_folder(name, weights=False) for name in sorted({*policies} - {""})]
        width = min((from_hf(model_config(folder)).hidden_size for folder in folders), default=0)
    return make_mesh(shape, width=width)


def initial_models(job: Job) -> dict[str, str]:
    """Returns the name of the model that each policy starts from, by policy."""
    # Sorted, so that every process loads the policies in one order and gives them equal seeds.
    return dict.fromkeys(sorted(set(job.policy_of.values())), job.policy) | dict(job.policies)


def load_policies(
    job: Job, mesh: Mesh | None, dtype: str = "", load: PolicyLoader | None = None
) -> tuple[dict[str, Decoder], ChatTokenizer]:
    """Loads every policy of the system, and the tokenizer that they share.

    Args:
      job: the run.
      mesh: the mesh that the weights are sharded over; None: the first device.
      dtype: the dtype of the weights. Empty: float32 for trained weights; the compute dtype of the
        run for frozen weights below an adapter, so that a sampler can use them directly.
      load: loads models; by default a new `shared_loader`.

    Raises:
      UserError: a policy is unknown, the policies have different tokenizers, or their tokenizer
        cannot write a strict grammar.
    """
    names = sorted(set(job.policy_of.values()))
    # Policies that start from one folder share its loaded weights.
    folders = initial_models(job)
    if unknown := sorted(set(folders) - set(names)):
        valid_names = ", ".join(dict.fromkeys([*names, *job.policy_of]))
        raise UserError(f"policies names {unknown[0]!r}: this system has {valid_names}")
    # Optimizers need float32 weights; frozen weights below an adapter are never updated.
    dtype = dtype or ("float32" if job.lora is None else job.compute_dtype)
    load = load or shared_loader()
    by_folder = {folder: load(folder, mesh, dtype) for folder in sorted(set(folders.values()))}
    for policy, _ in by_folder.values():
        # The implementation is a choice of the run, not of the checkpoint.
        policy.config = dataclasses.replace(policy.config, attention_impl=job.attention)
    # One vocabulary: contexts of all roles are encoded by one tokenizer.
    tokenizers = {tuple(sorted(t.vocabulary().items())) for _, t in by_folder.values()}
    if len(tokenizers) > 1:
        raise UserError(
            f"policies {sorted(by_folder)} have different tokenizers: a run needs one vocabulary"
        )
    policies = {name: by_folder[folder][0] for name, folder in folders.items()}
    if job.lora is not None:
        policies = {
            # Different seeds, so that adapters of several policies start differently.
            name: add_lora(policy, job.lora, rngs=nnx.Rngs(job.seed + i))
            for i, (name, policy) in enumerate(policies.items())
        }
    tokenizer = by_folder[folders[names[0]]][1]
    for folder, (_, own) in by_folder.items():
        _report(folder, compare_with_roles(folder, own, job))
    # Before a long run, and not when the first action of a role is sampled.
    systems = (job.recipe.system, job.recipe.evaluation_system)
    check_grammars((role for s in systems for role in s.roles.values()), tokenizer)
    return policies, tokenizer


class LoadedData(NamedTuple):
    """Corpus, questions by split, and the synthetic world if the data are generated."""

    corpus: Corpus
    questions: Mapping[str, tuple[Question, ...]]
    world: worlds.World | None


def load_data(
    data: Data, folder: pathlib.Path | None = None, index: Index | None = None
) -> LoadedData:
    """Loads or generates corpus and questions.

    Args:
      data: the config of the data.
      folder: the folder of the index, which also stores the passages of a file; None holds them in
        memory.
      index: the config of the index, whose encoder counts the size of chunks; None: words.
    """
    if data.files is not None:
        files = data.files
        names = f"{files.train},{files.dev},{files.test}".split(",")
        # The first process downloads files from the Hub; the others find it in the cache.
        process_zero_first(lambda: [data_path(name.strip()) for name in names])
        splits = {
            "train": tuple(
                load_mixture(
                    files.train, files.max_train_per_file, files.train_per_file, files.fields
                )
            ),
            "dev": tuple(load_mixture(files.dev, fields=files.fields)),
            "test": tuple(load_mixture(files.test, fields=files.fields)),
        }
        # A search server has its own corpus.
        if not files.corpus:
            return LoadedData(Corpus(()), splits, None)
        path = process_zero_first(lambda: data_path(files.corpus))
        # A config that says nothing reads the corpus as an index that exists.
        reading: Reading | None = config_reading(data, index)
        reading = None if reading is AS_IS else reading
        corpus = process_zero_first(lambda: load_indexed(path, folder, reading, own_folder=True))
        _check_gold(splits, corpus, files.corpus)
        return LoadedData(corpus, splits, None)
    if data.world is None:
        raise UserError("the config has no questions: set data.files or data.world")
    world = make_world(data.world)
    return LoadedData(Corpus(world.passages), world.questions, world)


def _check_gold(
    questions: Mapping[str, Sequence[Question]], corpus: Corpus, corpus_name: str
) -> None:
    """Warns of gold that the corpus lacks; raises `UserError` if it has none of a split's."""
    gold = {split: {name for q in part for name in q.gold} for split, part in questions.items()}
    missing = {split: set(names) for split, names in gold.items() if names}
    for n, passage in enumerate(corpus.passages):
        for names in missing.values():
            names -= passage.names
        # Reading all of a large corpus takes minutes, and would only find more of the gold.
        if n >= SOME_PASSAGES and all(len(missing[split]) < len(gold[split]) for split in missing):
            return
        if not any(missing.values()):
            return
    for split, names in missing.items():
        text = f"{len(names)} of {len(gold[split])} gold passages of data.files.{split} are not in"
        text = f"{text} {corpus_name}, such as {min(names, default='')!r}"
        if names == gold[split]:
            raise UserError(
                f"{text}, which has {example_names(corpus.passages)}: give {split} questions of "
                "this corpus, or the corpus that they are from"
            )
        if names and is_process_zero():
            print(f"ragrl: {text}: no search can return them", file=sys.stderr)


def config_reading(data: Data, index: Index | None) -> Reading:
    """Returns how the corpus of a config is read; `AS_IS` if the config does not say."""
    fields = data.files.fields if data.files else {}
    if data.chunk is None:
        return Reading(fields) if fields else AS_IS
    return Reading(fields, data.chunk, section_units(index))


def section_units(index: Index | None) -> Units:
    """Returns the units of the first encoder of an index, or words without one."""
    sections = index.sections if isinstance(index, PipelineIndex) else (index,)
    names = (part.encoder for part in sections if isinstance(part, VectorIndex))
    units = (units_of(name) for name in names if name != HASHED_WORDS)
    return next(units, WORDS)


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

    Args:
      corpus: the passages; not read for a server.
      index: the config of the index.
      workdir: the folder of the run, which holds the index unless the config names another folder.
      llm: loads the frozen language model, for a pipeline that it reranks.
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
    """Holds the lock of the folder of an index while it is built; a collective.

    An index that exists is opened without a lock, since its folder may be read-only.
    """
    # A command that holds the lock already, such as `ragrl index`, keeps it afterwards.
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
    """Opens the index of a corpus; builds it first if there is none.

    Args:
      corpus: the passages.
      index: the config of the index.
      workdir: the folder of the run, which holds the index unless the config names another folder.

    Raises:
      UserError: the index in the folder has another kind, dtype or encoder, or the encoder of the
        config cannot be loaded.
    """
    folder = process_zero_first(lambda: corpus_folder(corpus, index, workdir))
    if not on_process_zero((folder / INDEX_FILE).exists):
        encoder = process_zero_first(lambda: make_encoder(index.encoder, corpus))
        return build_index(
            corpus, encoder, index.kind, folder, dtype=index.dtype, recall=index.recall
        )
    check_index_settings(index, folder)
    return process_zero_first(
        lambda: open_index(folder, corpus, _config_encoder(index, folder, corpus))
    )


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
    """Whether a config names another encoder than the index in a folder, perhaps a moved copy.

    Args:
      index: the config of the index.
      folder: of the index.
    """
    path = pathlib.Path(index.encoder)
    # As `load_encoder` describes its source: a built-in encoder is a name in any folder.
    is_folder = index.encoder not in BUILTIN and path.is_dir()
    return encoder_source(read_description(folder)) != (
        str(path.absolute()) if is_folder else index.encoder
    )


SOME_PASSAGES = 200_000  # passages in which some gold of every split must be
BUILTIN = {HASHED_WORDS, MINILM}


def check_index_settings(index: VectorIndex, folder: pathlib.Path) -> None:
    """Raises `UserError` if the index in a folder was built with other settings."""
    # `open_index` takes kind, dtype and encoder from the folder.
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


def policy_folder(name: str, *, weights: bool = True) -> pathlib.Path:
    """Returns the local folder of a model by its name, see `by_name.resolve_model`.

    All processes call it together: the first one downloads or converts a model that is missing.
    """
    return process_zero_first(lambda: resolve_model(name, weights=weights))


def load_policy(
    name: str, mesh: Mesh | None = None, dtype: str = "float32", rules: Rules | None = None
) -> tuple[Decoder, ChatTokenizer]:
    """Loads a decoder and its tokenizer.

    Args:
      name: the name of the model, see `by_name.resolve_model`.
      mesh: the mesh that the weights are sharded over; None: the first device.
      dtype: the dtype of the weights.
      rules: how the mesh splits them; None: as for training.
    """
    folder = policy_folder(name)
    tokenizer = ChatTokenizer.load(folder)
    _report(name, compare_chat(folder, tokenizer))  # before gigabytes are read
    decoder = load_decoder(folder, mesh, dtype, rules=rules)
    decoder.config = dataclasses.replace(decoder.config, num_tokens=len(tokenizer))
    return decoder, tokenizer


def _report(name: str, findings: Iterator[ChatFinding]) -> None:
    """Raises the first error about a model's prompts, and prints what a user should know."""
    for finding in findings:
        if finding.is_error:
            raise UserError(f"{name}: {finding.text}")
        if is_process_zero():
            _print_once(f"{name}: {finding.text}")


@functools.cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compare_with_roles(name: str, tokenizer: ChatTokenizer, job: Job) -> Iterator[ChatFinding]:
    """Yields what does not fit in a model, and between it and the roles of a run.

    Args:
      name: the name of the model.
      tokenizer: its tokenizer.
      job: the run, whose roles it plays.
    """
    systems = (job.recipe.system, job.recipe.evaluation_system)
    prompts = {key: m for s in systems for key, m in conversations(s.style).items()}
    roles = [role for s in systems for role in s.roles.values()]
    grammars = {text for role in roles for text in (*role.stop_strings, role.action_regex)}
    thinks = any(role.thinking for role in roles)
    folder = policy_folder(name, weights=False)
    yield from compare_chat(folder, tokenizer, prompts, sorted(grammars), thinking=thinks)


# Loads a model with the arguments of `load_policy`.
PolicyLoader = Callable[..., tuple[Decoder, ChatTokenizer]]


def shared_loader() -> PolicyLoader:
    """Returns a `load_policy` that holds each set of weights once.

    Models of one folder, layout and dtype share their arrays; each has its own config. The loader
    keeps the arrays alive, so discard it when all models are loaded.
    """

    load_once = functools.cache(load_policy)

    def load(
        name: str, mesh: Mesh | None, dtype: str, rules: Rules | None = None
    ) -> tuple[Decoder, ChatTokenizer]:
        # Without FSDP a policy and a frozen model have one layout.
        rules = rules if _has_fsdp(mesh) else None
        # By folder, because one folder has several names.
        decoder, tokenizer = load_once(str(policy_folder(name)), mesh, dtype, rules)
        return nnx.merge(*nnx.split(decoder)), tokenizer

    return load


def _has_fsdp(mesh: Mesh | None) -> bool:
    return mesh is not None and mesh.shape["fsdp"] > 1


def load_llm(
    llm: LLM,
    world: worlds.World | None,
    style: str,
    shapes: Shapes,
    mesh: Mesh | None = None,
    load: PolicyLoader | None = None,
    cache: pathlib.Path | None = None,
) -> FrozenLLM:
    """Builds a frozen language model.

    Args:
      llm: its config.
      world: the synthetic world, if the data are generated; only the world reader needs it.
      style: the folder of the system's prompts.
      shapes: the static shapes of sampling, for a local model.
      mesh: the mesh of this process's devices for a local model; None: the first device.
      load: loads a local model, see `shared_loader`; by default it is loaded on its own.
      cache: a file of earlier replies of a server, used unless the config forbids it; None: none.
    """
    if isinstance(llm, NoLLMConfig):
        return NoLLM()
    if isinstance(llm, OpenAIConfig):
        return _server_llm(llm, cache if llm.cache else None)
    if isinstance(llm, LocalLLMConfig):
        # A program that samples would gather weights with FSDP for each token. The weights of an
        # int8 model are gathered once, after they are quantized.
        rules = None if llm.int8 else SAMPLING_RULES
        return _local_llm(llm, shapes, *(load or load_policy)(llm.model, mesh, llm.dtype, rules))
    # Checked last: every other kind works on any data.
    if world is None:
        raise UserError(
            "llm.kind is world_reader, but the data are not generated: use local or openai, or "
            "none for a system that does not call a language model"
        )
    return WorldExecutors(
        world, style=style, limit=llm.max_documents, noise=llm.noise, confusion=llm.confusion
    )


def _server_llm(llm: OpenAIConfig, cache: pathlib.Path | None) -> OpenAILLM:
    return OpenAILLM(
        llm.model,
        llm.base_url,
        concurrency=llm.concurrency,
        retries=llm.retries,
        timeout=llm.timeout,
        extra=llm.extra_body,
        cache=cache,
    )


def _local_llm(
    llm: LocalLLMConfig, shapes: Shapes, decoder: Decoder, tokenizer: ChatTokenizer
) -> LocalLLM:
    # Only frozen models are quantized: a policy must sample with the weights that it trains.
    decoder = quantize_decoder(decoder) if llm.int8 else decoder
    # Replies of a frozen model may be longer than the actions of a policy. A cache is only as long
    # as the limits of its requests, so this costs nothing.
    limit = llm.max_tokens or max(shapes.max_new_tokens, REPLY)
    # Requests to a frozen model continue no conversation, and each call has new contexts.
    shapes = dataclasses.replace(shapes, max_new_tokens=limit, kept_contexts=0)
    model, thinking = without_fsdp(SplitModel.from_model(decoder)), llm.thinking == "on"
    return LocalLLM(model, tokenizer, shapes, f"local {llm.model}", thinking=thinking)
