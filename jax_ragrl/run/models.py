"""The models of a run: its policies on their mesh, and frozen language models."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.corpus import world as worlds
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM, NoLLM
from jax_ragrl.llm.executors import WorldExecutors
from jax_ragrl.llm.kinds import LLM, LocalLLMConfig, NoLLMConfig, OpenAIConfig
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.models.by_name import model_config, resolve_model
from jax_ragrl.models.chat import ChatFinding, compare_chat
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.hf_config import from_hf
from jax_ragrl.models.int8 import quantize_decoder
from jax_ragrl.models.lora import add_lora
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.policy import check_grammars
from jax_ragrl.run.config import REPLY, Job
from jax_ragrl.runtime.multihost import is_process_zero, process_zero_first
from jax_ragrl.runtime.sharding import Rules, make_mesh
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import SAMPLING_RULES, without_fsdp
from jax_ragrl.text.prompts import conversations
from jax_ragrl.text.tokenizer import ChatTokenizer

# Loads a model with the arguments of `load_policy`.
PolicyLoader = Callable[..., tuple[Decoder, ChatTokenizer]]


def mesh_for(job: Job) -> Mesh | None:
    """Returns the mesh of a run; None: the first device. A run on several hosts needs a mesh."""
    if not job.mesh and jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes train one policy, but this config has no mesh: set "
            'one over all devices, such as --config.mesh="(-1,-1,1)"'
        )
    return mesh_of_shape(job.mesh, [job.policy, *dict(job.policies).values()])


def mesh_of_shape(shape: tuple[int, ...], policies: Sequence[str]) -> Mesh | None:
    """Returns a mesh, which may depend on the width of `policies`; None for an empty shape."""
    if not shape:
        return None
    width = 0
    if shape[:2] == (-1, -1):
        # The narrowest model, which is the first to have no columns left for another device.
        folders = [policy_folder(name, weights=False) for name in sorted({*policies} - {""})]
        width = min((from_hf(model_config(folder)).hidden_size for folder in folders), default=0)
    return make_mesh(shape, width=width)


def initial_models(job: Job) -> dict[str, str]:
    """Returns the model that each policy starts from, by policy; `UserError` for an unknown one."""
    # Sorted, so that every process loads the policies in one order and gives them equal seeds.
    names = sorted(set(job.policy_of.values()))
    own = {name: model or job.policy for name, model in job.policies}
    if unknown := sorted(own.keys() - set(names)):
        valid_names = ", ".join(dict.fromkeys([*names, *job.policy_of]))
        raise UserError(f"policies names {unknown[0]!r}: this system has {valid_names}")
    return dict.fromkeys(names, job.policy) | own


def load_policies(
    job: Job, mesh: Mesh | None, dtype: str = "", load: PolicyLoader | None = None
) -> tuple[dict[str, Decoder], ChatTokenizer]:
    """Loads every policy of the system on a mesh, and the tokenizer that they share.

    By default trained weights are float32; frozen weights below an adapter have the compute dtype
    of the run, so that a sampler can use them directly. `load` is by default a new `shared_loader`.

    Raises:
      UserError: a policy is unknown, the policies have different tokenizers, or their tokenizer
        cannot write a strict grammar.
    """
    folders = initial_models(job)
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
            name: add_lora(policy, job.lora, rngs=nnx.Rngs(job.seed + i))
            for i, (name, policy) in enumerate(policies.items())
        }
    tokenizer = by_folder[next(iter(folders.values()))][1]
    for folder, (_, own) in by_folder.items():
        _report(folder, compare_with_roles(folder, own, job))
    systems = (job.recipe.system, job.recipe.evaluation_system)
    check_grammars((role for s in systems for role in s.roles.values()), tokenizer)
    return policies, tokenizer


def policy_folder(name: str, *, weights: bool = True) -> pathlib.Path:
    """Returns the local folder of a model by its name (`by_name.resolve_model`); a collective."""
    return process_zero_first(lambda: resolve_model(name, weights=weights))


def load_policy(
    name: str, mesh: Mesh | None = None, dtype: str = "float32", rules: Rules | None = None
) -> tuple[Decoder, ChatTokenizer]:
    """Loads a decoder and its tokenizer by the name of a model, see `by_name.resolve_model`.

    Without a mesh the weights are on the first device; `rules`, by default those of training, say
    how a mesh splits them.
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
    """Yields what does not fit in a model, and between it and the roles of a run."""
    systems = (job.recipe.system, job.recipe.evaluation_system)
    prompts = {key: m for s in systems for key, m in conversations(s.style).items()}
    roles = [role for s in systems for role in s.roles.values()]
    grammars = {text for role in roles for text in (*role.stop_strings, role.action_regex)}
    thinks = any(role.thinking for role in roles)
    folder = policy_folder(name, weights=False)
    yield from compare_chat(folder, tokenizer, prompts, sorted(grammars), thinking=thinks)


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
        rules = rules if mesh is not None and mesh.shape["fsdp"] > 1 else None
        # By folder, because one folder has several names.
        decoder, tokenizer = load_once(str(policy_folder(name)), mesh, dtype, rules)
        return nnx.merge(*nnx.split(decoder)), tokenizer

    return load


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

    The world reader needs the `world` and the `style`, the folder of the system's prompts. A local
    model needs the static `shapes` of sampling, the `mesh` of this process's devices, and `load`,
    which is `load_policy` by default. `cache` is a file of earlier replies of a server.
    """
    if isinstance(llm, NoLLMConfig):
        return NoLLM()
    if isinstance(llm, OpenAIConfig):
        return OpenAILLM(
            llm.model,
            llm.base_url,
            concurrency=llm.concurrency,
            retries=llm.retries,
            timeout=llm.timeout,
            extra=llm.extra_body,
            cache=cache if llm.cache else None,
            replies=data_path(llm.replies) if llm.replies else None,
            replies_only=llm.replies_only,
        )
    if isinstance(llm, LocalLLMConfig):
        # A program that samples would gather weights with FSDP for each token. The weights of an
        # int8 model are gathered once, after they are quantized.
        rules = None if llm.int8 else SAMPLING_RULES
        decoder, tokenizer = (load or load_policy)(llm.model, mesh, llm.dtype, rules)
        # Only frozen models are quantized: a policy must sample with the weights that it trains.
        decoder = quantize_decoder(decoder) if llm.int8 else decoder
        # Replies of a frozen model may be longer than the actions of a policy. A cache is only as
        # long as the limits of its requests, so this costs nothing.
        limit = llm.max_tokens or max(shapes.max_new_tokens, REPLY)
        # Requests to a frozen model continue no conversation.
        shapes = dataclasses.replace(shapes, max_new_tokens=limit, kept_contexts=0)
        model, thinks = without_fsdp(SplitModel.from_model(decoder)), llm.thinking == "on"
        return LocalLLM(model, tokenizer, shapes, f"local {llm.model}", thinking=thinks)
    if world is None:
        raise UserError(
            "llm.kind is world_reader, but the data are not generated: use local or openai, or "
            "none for a system that does not call a language model"
        )
    return WorldExecutors(
        world, style=style, limit=llm.max_documents, noise=llm.noise, confusion=llm.confusion
    )
