"""Compiles the programs of a run before its first step (`run.compile_ahead`)."""

from __future__ import annotations

from collections.abc import Mapping

from jax_ragrl.learner.policies import Policies
from jax_ragrl.learner.update_programs import update_programs
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.pending import job_of_role
from jax_ragrl.run.config import Job
from jax_ragrl.run.indicators import OFF
from jax_ragrl.runtime.compile_ahead import Program, compile_programs
from jax_ragrl.runtime.multihost import on_process_zero
from jax_ragrl.runtime.small_programs import count_cores
from jax_ragrl.sampling.sampler import JobSampler
from jax_ragrl.text.tokenizer import ChatTokenizer


def compile_ahead(
    job: Job, policies: Policies, models: Mapping[str, SplitModel], tokenizer: ChatTokenizer
) -> int:
    """Compiles the programs of the sampler and of the updates, in as many threads as cores.

    Without `run.compile_ahead` programs for accelerators are compiled if each has its own core:
    then all of them take about as long as one.

    Args:
      job: the run's config.
      policies: the policies before the first step; no array of theirs is read.
      models: the policies as they sample, see `acting_models`.
      tokenizer: the tokenizer of all policies.

    Returns:
      The number of compiled programs.
    """
    programs = programs_of_run(job, policies, models, tokenizer)
    # All processes compile the same programs, whatever the cores of their machines.
    cores = on_process_zero(count_cores)
    if not job.run.compile_ahead and len(programs) > cores:
        return 0
    return compile_programs(programs, max(1, min(len(programs), cores)))


def programs_of_run(
    job: Job, policies: Policies, models: Mapping[str, SplitModel], tokenizer: ChatTokenizer
) -> list[Program]:
    """Returns the programs of the sampler and of the updates; arguments as in `compile_ahead`."""
    # Updates first: these programs take longest.
    programs = list[Program]()
    if job.preference is None:
        is_measured = job.guard.update_kl.action != OFF
        for policy in policies.values():
            programs += update_programs(policy, is_measured=is_measured)
    for name, model in models.items():
        programs += _programs_that_sample(job, name, model, tokenizer)
    return programs


def _programs_that_sample(
    job: Job, name: str, model: SplitModel, tokenizer: ChatTokenizer
) -> list[Program]:
    """Returns the programs that sample the roles of a policy."""
    recipe, shapes = job.recipe, job.shapes
    roles = [*recipe.system.roles.values(), *recipe.evaluation_system.roles.values()]
    # Equal jobs share their programs.
    jobs = [*dict.fromkeys(job_of_role(r, shapes) for r in roles if r.policy == name)]
    # An evaluation and a forced beginning sample one action.
    widths = sorted({1, recipe.width}, reverse=True)
    return JobSampler(model, tokenizer, shapes).programs(jobs, widths, draws=recipe.rollouts)
