"""Computes memory, traffic and least times of a run per device, without weights or devices.

The programs of a run are compiled for described devices; the compiler reports their temporary
memory, and their optimized HLO has what they move. The data sheet of a device bounds their time.
Permanent memory is computed from shapes and shardings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.models import hub
from jax_ragrl.models.by_name import PACKAGED
from jax_ragrl.models.config import DecoderConfig, param_count
from jax_ragrl.models.published import published_config
from jax_ragrl.plan.abstract_arrays import fitting
from jax_ragrl.plan.fit import SAMPLING
from jax_ragrl.plan.index_memory import index_memory
from jax_ragrl.plan.other_models import config_by_name, count_other_models, host_mesh, index_place
from jax_ragrl.plan.policies import PlannedPolicy, count_rollout, count_updates, state_bytes
from jax_ragrl.plan.speed import (
    checkpoint_bytes,
    compile_seconds,
    count_programs,
    least_times,
    update_passes,
)
from jax_ragrl.run.config import Job
from jax_ragrl.run.indicators import OFF
from jax_ragrl.run.models import initial_models
from jax_ragrl.runtime.free_work import free_tokens
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.topology import CEILINGS, memory_of

# All devices, with an fsdp axis that suits the narrowest policy.
ALL_DEVICES = (-1, -1, 1)


def plan(job: Job, config: DecoderConfig, devices: Sequence[Any]) -> dict[str, Any]:
    """Computes the bytes per device of real or described devices.

    `config` is the architecture of the policies that `job.policies` does not contain.

    Returns:
      `state_bytes`: permanent memory of the policies. `update` and `sampling`: the programs with
      the largest memory, see `count_updates` and `count_rollout`. `other_models`: an exact index,
      its encoder and local language models. `index_memory` and `index_place`: see these functions.
      `uncounted`: messages about parts of the config that are not counted, or only approximately.
      `peak_bytes`: the largest program on top of the permanent memory; with stale rollouts the
      largest update and the largest rollout. `fits`: whether the peak is below the memory of a
      device; None if this is unknown. If something is uncounted, `fits` can be False, but not True.
      `passes`, `programs`, `compile_s`, `checkpoint_bytes` and `speed`: see `plan/speed.py`;
      devices without a data sheet have no `speed`. `changes`: keys of the config to set, so that a
      run uses what is planned: without a mesh it would use one device.

      One gradient is counted: policies and critics are updated one after the other, a critic by a
      program like that of its policy.

    Raises:
      TooLargeError: the compiler of a TPU found that a program needs more memory, or the axis
        tensor spans several hosts.
    """
    policies, approximations = policies_of(job, config)
    # A run without a mesh uses one device; a plan shards over all devices by default.
    width = min(policy.config.hidden_size for policy in policies.values())
    mesh = make_mesh(job.mesh or ALL_DEVICES, devices, width)
    host = host_mesh(mesh)
    if job.preference is not None:
        approximations.append("preference: an update by pairs, counted as one by the objective")
    sampling, update = _programs(job, policies, mesh)
    others = count_other_models(job.index, {"llm": job.llm, "judge": job.judge}, job.shapes, mesh)
    state = state_bytes(policies, job.objective, job.optimizer, mesh)
    # A language model generates while the policies wait, so its memory adds only to their weights.
    rollout = max(sampling["bytes"], sampling["weight_bytes"] + others.generation_bytes)
    largest = update["bytes"] + rollout if job.run.staleness else max(update["bytes"], rollout)
    peak = state + others.permanent_bytes + largest
    memory = memory_of(devices[0])
    # An approximation may be too high or too low; an uncounted model can only add to the peak.
    is_certain = not approximations and not (memory and peak < memory and others.uncounted_models)
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "policies": {name: policy.parameter_counts() for name, policy in policies.items()},
        "state_bytes": state,
        "update": update,
        "sampling": sampling,
        "other_models": others.sections,
        "index_memory": index_memory(job.index, host.size),
        "index_place": index_place(others, peak, memory),
        "uncounted": others.uncounted_models + approximations,
        "peak_bytes": peak,
        "memory_bytes": memory,
        "fits": peak < memory if memory and is_certain else None,
        "changes": {"mesh": tuple(mesh.shape.values())} if not job.mesh and mesh.size > 1 else {},
        **_speed(job, policies, update, sampling, mesh),
    }


def _programs(
    job: Job, policies: Mapping[str, PlannedPolicy], mesh: Mesh
) -> tuple[dict[str, Any], dict[str, Any]]:
    roles = job.recipe.system.roles
    # The rollout comes first: for one mesh, `fit` changes the update alone.
    with fitting(SAMPLING, "shapes.max_prompt_tokens or shapes.batch_sizes"):
        sampling = count_rollout(
            *(policies, job.shapes, job.recipe.width, mesh),
            nucleus=any(role.sampling.top_p < 1 for role in roles.values()),
            outlive_update=bool(job.run.staleness),
        )
    with fitting("an update", "packing.tokens_per_device, recompute more (remat)"):
        return sampling, count_updates(policies, job.objective, job.packing, mesh)


def _speed(
    job: Job,
    policies: Mapping[str, PlannedPolicy],
    update: Mapping[str, Any],
    sampling: Mapping[str, Any],
    mesh: Mesh,
) -> dict[str, Any]:
    """The sections about time, programs and disk."""
    largest = max(policies.values(), key=lambda policy: param_count(policy.config))
    parameters = param_count(largest.config)
    ceilings = CEILINGS.get(mesh.devices.flat[0].device_kind)
    # Those that are worth a program on the devices of the mesh.
    shapes = job.shapes.coarse(free_tokens(parameters, mesh))
    packing = job.packing.coarse(free_tokens(parameters, mesh, is_trained=True))
    host, recipe = host_mesh(mesh), job.recipe
    programs = count_programs(shapes, packing, job.objective, recipe.width, host, recipe.rollouts)
    return {
        "passes": update_passes(
            largest.config,
            job.objective,
            job.optimizer,
            max(job.packing.row_lengths),
            lora=largest.lora is not None,
            is_measured=job.guard.update_kl.action != OFF,
        ),
        "programs": programs,
        "compile_s": compile_seconds(programs, update, sampling),
        "checkpoint_bytes": checkpoint_bytes(policies, job.objective, job.optimizer),
        "speed": least_times(update, sampling, mesh.size, ceilings) if ceilings else None,
    }


def policies_of(job: Job, config: DecoderConfig) -> tuple[dict[str, PlannedPolicy], list[str]]:
    """The policies of a run, and messages about those whose architecture is unknown.

    Policies that `job.policies` does not contain have the architecture `config`.
    """
    own, policies, unknown = dict(job.policies), {}, []
    for name, model in initial_models(job).items():
        try:
            policy = config_named(model) if own.get(name) else config
        except UserError as error:
            policy = config
            unknown.append(f"policies.{name}: counted as --shape ({error})")
        policy = dataclasses.replace(
            policy, dtype=job.compute_dtype, remat=job.remat, attention_impl=job.attention
        )
        policies[name] = PlannedPolicy(model, policy, job.lora)
    return policies, unknown


def config_named(name: str) -> DecoderConfig:
    """Returns the architecture of a decoder by its published size or the name of a model."""
    if name in PACKAGED or local(name).exists():
        return config_by_name(name)
    try:
        return published_config(name)
    except UserError:
        if not hub.NAME.fullmatch(name):
            raise
        return config_by_name(name)
