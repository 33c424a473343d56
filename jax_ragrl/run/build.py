"""Builds the components of a run from its config."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.llm.cache import FILE as CACHE_FILE
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.tools import Tools
from jax_ragrl.run.checkpoint_name import has_checkpoints
from jax_ragrl.run.config import Job
from jax_ragrl.run.data import LoadedData, load_data
from jax_ragrl.run.index import index_folder, load_retriever
from jax_ragrl.run.models import PolicyLoader, load_llm, load_policies, mesh_for, shared_loader
from jax_ragrl.run.parts import Components
from jax_ragrl.run.start_from import start_policies
from jax_ragrl.runtime.sharding import local_mesh
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question


def build_components(
    job: Job,
    workdir: pathlib.Path,
    *,
    questions: Mapping[str, tuple[Question, ...]] | None = None,
    retriever: Retriever | None = None,
    llm: FrozenLLM | None = None,
) -> Components:
    """Builds all components of a run; builds the index in the work folder if there is none.

    `questions` by split (`train`, `dev`, `test`), `retriever` and `llm` replace those of the
    config.
    """
    if questions is not None and retriever is not None:
        data = LoadedData(Corpus(()), questions, None)  # the config's corpus is not needed
    else:
        data = load_data(job.data, index_folder(job.index, workdir), job.index)
        data = data._replace(questions=questions or data.questions)
    # Data before models: a wrong path fails before weights are loaded.
    mesh, load = mesh_for(job), shared_loader()
    policies, tokenizer = load_policies(job, mesh, load=load)
    if job.start_from and not has_checkpoints(workdir):
        policies = start_policies(job, policies)
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
    """Builds all components of a run but its policies; arguments as in `build_components`."""
    corpus, questions, world = data
    load_frozen = functools.partial(
        load_llm,
        world=world,
        style=job.recipe.system.style,
        shapes=job.shapes,
        mesh=local_mesh(mesh),
        load=load or shared_loader(),
        cache=reply_cache(workdir),
    )
    language_model = load_frozen(job.llm) if llm is None else llm
    if retriever is None:
        retriever = load_retriever(corpus, job.index, workdir, lambda: language_model)
    return Components(
        questions=questions,
        retriever=retriever,
        llm=language_model,
        policies={},
        tokenizer=tokenizer,
        judge=load_frozen(job.judge) if job.judge.kind != "none" else None,
        tools=Tools(job.tools),
    )


def reply_cache(folder: pathlib.Path) -> pathlib.Path:
    """Returns the file of cached replies in a folder."""
    # Each process has its own: a file system that hosts share may have no locks.
    process = jax.process_index()
    return folder / (f"{process}-{CACHE_FILE}" if process else CACHE_FILE)
