"""The policies of a run and the method of its steps, from its config."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from jax_ragrl.learner.grammars import role_grammars
from jax_ragrl.learner.policies import Policies, with_kl, with_new_references, with_rate
from jax_ragrl.learner.state import PolicyState, prepare, trained_decoder
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.run.config import Job
from jax_ragrl.run.indicators import OFF
from jax_ragrl.run.parts import Components
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.training.handover import Handover
from jax_ragrl.training.step import Method


def method_of(job: Job) -> Method:
    is_carried = job.objective.gae_span == "conversation"
    return Method(
        job.recipe,
        job.credit,
        seed=job.seed,
        schedule=job.schedule,
        lockstep=job.run.lockstep,
        train_forced=job.train_forced,
        refill=job.run.refill,
        carry_tokens=job.packing.row_lengths[-1] if is_carried else 0,
        preference=job.preference,
        is_measured=job.guard.update_kl.action != OFF,
        role_gradients_every=job.run.role_gradients_every,
    )


def prepare_policies(
    job: Job, decoders: Mapping[str, Decoder], tokenizer: ChatTokenizer
) -> Policies:
    """Builds the policies of a run from the initial decoders, which remain unchanged."""
    policies = {}
    grammars = role_grammars(job.recipe.system.roles.values(), tokenizer)
    for name, decoder in decoders.items():
        policies[name] = prepare(
            decoder,
            objective=job.objective,
            optimizer=job.optimizer,
            layout=job.packing,
            roles=tuple(job.policy_of),
            temperature=job.temperature,
            updates=updates_of(job, name),
            compute=job.compute_dtype,
            remat=job.remat,
            allowed_ZV=allowed_tokens(job, tokenizer, decoder.config.vocab_size),
            grammars=grammars,
            shares_devices=bool(job.run.staleness),
        )
    return policies


def updates_of(job: Job, policy: str) -> int:
    own = [role for role, name in job.policy_of.items() if name == policy]
    return job.schedule.updates(job.run.steps, tuple(job.policy_of), own)


def enter_phase(job: Job, policies: Policies, step: int, *, first: bool) -> Policies:
    """Applies the settings of a step's phase to the policies before the step.

    At the first step of a phase the policies get its learning rate and KL coefficient, and their
    references become copies of them. At the `first` step of a process the rate is set too, because
    it is not part of a checkpoint.
    """
    begins, phase = job.schedule.begins_phase(step), job.schedule.phase(step)
    if begins:
        policies = with_new_references(policies)
    if phase is None or not (first or begins):
        return policies
    # A phase without its own rate returns to the rate of the run, if any phase has one.
    if any(p.policy_lr for p in job.schedule.phases):
        updates = {name: updates_of(job, name) for name in policies}
        rate = phase.policy_lr or job.optimizer.policy_lr
        policies = with_rate(policies, rate, job.optimizer, updates)
    # The coefficient is part of the state, so it is set only when a phase begins.
    if any(p.kl_coefficient for p in job.schedule.phases) and (step == 0 or begins):
        policies = with_kl(policies, phase.kl_coefficient or job.objective.kl.coefficient)
    return policies


def allowed_tokens(job: Job, tokenizer: ChatTokenizer, size: int) -> np.ndarray | None:
    """Returns the tokens that the grammar of each role allows, bool `[Z, V]`; None: all.

    `size` is the vocabulary of the model, which may exceed the tokenizer's.
    """
    patterns = [role.allowed_token_regex for role in job.recipe.system.roles.values()]
    if not any(patterns):
        return None
    masks = [tokenizer.allowed_tokens(pattern) for pattern in patterns]
    every_V = np.ones(size, bool)
    return np.stack([every_V if m is None else np.pad(m, (0, size - len(m))) for m in masks])


def trained_state(policies: Policies) -> dict[str, PolicyState]:
    return {name: policy.state for name, policy in policies.items()}


def acting_models(policies: Policies, *, outlive_update: bool = False) -> dict[str, SplitModel]:
    """Returns the policies for a sampler, see `for_sampling`.

    With `outlive_update` all trained arrays are copied, because the next update donates them.
    """
    decoders = {name: trained_decoder(policy) for name, policy in policies.items()}
    params = jax.tree.leaves([policy.state.policy.params for policy in policies.values()])
    return for_sampling(decoders, donated_arrays=params if outlive_update else ())


def acting_environment(
    job: Job,
    parts: Components,
    policies: Policies,
    outlive_update: bool = False,
    handover: Handover | None = None,
) -> Environment:
    """Returns an environment in which the policies act, by the engine of a `handover` if given.

    `outlive_update` is as in `acting_models`.
    """
    if handover is not None:
        samplers = handover.samplers(policies)
        sampler = PolicySampler({}, parts.tokenizer, job.shapes, samplers=samplers)
        return parts.environment(sampler)
    models = acting_models(policies, outlive_update=outlive_update)
    return parts.environment(PolicySampler(models, parts.tokenizer, job.shapes))
