"""Checks of models: names, tokenizers, endpoints, and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.kinds import LLM, LocalLLMConfig, OpenAIConfig, WorldReaderConfig
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.llm.recorded import read_replies
from jax_ragrl.models.by_name import resolve_model
from jax_ragrl.models.chat import compare_chat
from jax_ragrl.plan import PlannedPolicy, config_named, state_bytes
from jax_ragrl.retrieval.kinds import ServerIndex
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.rollout.policy import check_grammars
from jax_ragrl.run.config import Job
from jax_ragrl.run.index import server_retriever
from jax_ragrl.run.models import compare_with_roles, initial_models, mesh_for
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.text.prompts import conversations
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest, Message, Sampling
from jax_ragrl.validation.findings import Finding, Level, guarded

PATIENCE = 20.0  # seconds for the reply of an endpoint, which is asked once
PROBE = LLMRequest("a check", (Message("user", "Reply with OK."),), Sampling(0.0, 1.0, 8))


@guarded("policy")
def check_tokenizers(job: Job) -> Iterator[Finding]:
    """Compares the policies with their tokenizers, templates and roles, and compiles grammars."""
    folders = dict.fromkeys([job.policy, *initial_models(job).values()])
    tokenizers = {name: ChatTokenizer.load(resolve_model(name, weights=False)) for name in folders}
    fits = True
    for name, own in tokenizers.items():
        for finding in compare_with_roles(name, own, job):
            fits = fits and not finding.is_error
            level: Level = "error" if finding.is_error else "warning"
            yield Finding(level, "policy", f"{name}: {finding.text}")
    vocabularies = {tuple(sorted(t.vocabulary().items())) for t in tokenizers.values()}
    if len(vocabularies) > 1:
        raise UserError(
            f"policies {', '.join(folders)} have different tokenizers: a run needs one vocabulary"
        )
    systems = (job.recipe.system, job.recipe.evaluation_system)
    tokenizer = tokenizers[job.policy]
    check_grammars((role for s in systems for role in s.roles.values()), tokenizer)
    if fits:
        names = {i: token for token, i in tokenizer.vocabulary().items()}
        ends = ", ".join(names.get(i, f"id {i}") for i in tokenizer.stop_ids)
        text = f"the tokenizer fits the system; actions end with one of {ends}"
        yield Finding("ok", "policy", f"{', '.join(folders)}: {text}")


def check_models(job: Job, has_world: bool) -> Iterator[Finding]:
    """Checks that frozen models without a server can be used; sends and loads nothing."""
    styles = {"llm": job.recipe.system.style, "judge": "judge"}
    for topic, llm in (("llm", job.llm), ("judge", job.judge)):
        yield from guarded(topic)(_check_model)(topic, llm, styles[topic], has_world)


def _check_model(topic: str, llm: LLM, style: str, has_world: bool) -> Iterator[Finding]:
    if isinstance(llm, WorldReaderConfig) and not has_world:
        raise UserError(
            f"{topic}.kind is world_reader, but the data are not generated: use local or openai, "
            "or none for a system that does not call a language model"
        )
    if isinstance(llm, LocalLLMConfig):
        # The tokenizer is small, and its absence means that the model is not there.
        folder = resolve_model(llm.model, weights=False)
        tokenizer = ChatTokenizer.load(folder)
        for finding in compare_chat(
            folder, tokenizer, conversations(style), thinking=llm.thinking == "on"
        ):
            level: Level = "error" if finding.is_error else "warning"
            yield Finding(level, topic, f"{llm.model}: {finding.text}")
        yield Finding("ok", topic, f"{llm.model} is on this machine")


def check_endpoints(job: Job) -> Iterator[Finding]:
    """Sends one request to each endpoint of a config: language model, judge and retriever."""
    for topic, llm in (("llm", job.llm), ("judge", job.judge)):
        yield from guarded(topic)(_check_reply)(topic, llm)
    yield from check_server(job)


def _check_reply(topic: str, llm: LLM) -> Iterator[Finding]:
    if not isinstance(llm, OpenAIConfig):
        return
    if llm.replies:
        yield Finding("ok", topic, f"{llm.replies} holds {read_replies(data_path(llm.replies))}")
    if llm.replies_only:
        return
    patience = min(llm.timeout, PATIENCE)
    client = OpenAILLM(llm.model, llm.base_url, retries=0, timeout=patience, extra=llm.extra_body)
    (reply,) = client.complete([PROBE])
    if isinstance(reply, EffectError):
        raise UserError(f"{reply}: start the server, or correct {topic}.base_url and its model")
    yield Finding("ok", topic, f"{llm.model} replies {reply[:40]!r}")


@guarded("retriever")
def check_server(job: Job) -> Iterator[Finding]:
    """Sends one search to the server of an index, if its kind is one."""
    if not isinstance(job.index, ServerIndex):
        return
    index = dataclasses.replace(job.index, retries=0, timeout=min(job.index.timeout, PATIENCE))
    retriever = server_retriever(index, None)
    (hits,) = retriever.search(["capital of France"], 1)
    if isinstance(hits, EffectError):
        raise UserError(f"{hits}: start the server, or correct index.url")
    name = index.url if isinstance(retriever, RemoteRetriever) else index.kind
    yield Finding("ok", "retriever", f"{name} returns passages")


@guarded("memory")
def check_memory(job: Job) -> Iterator[Finding]:
    """Compares the permanent memory of the policies with that of a device, if it is known."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    # A CPU reports no limit, and then only the size is reported.
    limit = stats.get("bytes_limit")
    dtypes: dict[str, Any] = {"dtype": job.compute_dtype, "remat": job.remat}
    policies = {
        name: PlannedPolicy(folder, dataclasses.replace(config_named(folder), **dtypes), job.lora)
        for name, folder in initial_models(job).items()
    }
    mesh = mesh_for(job) or make_mesh((1, 1, 1), jax.devices()[:1])
    num_bytes = state_bytes(policies, job.objective, job.optimizer, mesh)
    text = f"policies and optimizer take {num_bytes / 2**30:.2f} GiB per device"
    if limit and num_bytes > limit:
        raise UserError(
            f"{text}, but {device.device_kind} has {limit / 2**30:.2f}: use lora, a larger mesh or "
            "a smaller policy"
        )
    yield Finding("ok", "memory", f"{text}; 'ragrl config plan' counts activations too")
