"""The programs of an update, listed before they are called.

An update calls a program for each shape of a batch of rows and each pass: scores of the policy, the
reference and the critic, and gradients of the policy and the critic. A few more work on parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_ragrl.learner.gradients import Gradient, add, apply, gradient, score, zeros
from jax_ragrl.learner.packing import PLAIN_FROM, Rows, blank_rows, shape_of
from jax_ragrl.learner.state import ModelSpec, Policy, PolicySpec, scalar
from jax_ragrl.learner.targets import Targets
from jax_ragrl.learner.update import needs_old_logps
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.compile_ahead import Program
from jax_ragrl.runtime.sharding import data_parallel_size, shard_batch


def update_programs(policy: Policy, *, is_measured: bool = False) -> list[Program]:
    """Returns the programs of the updates of a policy.

    Not listed are the advantages, whose shape depends on the number of actions, and gradients of
    single roles.

    Args:
      policy: the policy; its arrays are not read.
      is_measured: as in `update`.
    """
    spec, state = policy
    pairs = [(spec.policy, state.policy)]
    if spec.critic is not None and state.critic is not None:
        pairs.append((spec.critic, state.critic))
    programs = list[Program]()
    for trained, trained_state in pairs:
        step = (trained.optimizer, trained_state, trained_state.params)
        blank = (trained_state.params, trained.layout)
        programs.append(Program("optimizer step", apply, step, mesh=spec.mesh))
        programs.append(Program("gradient of zeros", zeros, blank, mesh=spec.mesh))
    temperature = scalar(spec.temperature, spec.mesh)
    for rows, targets in shard_batch([*_blank_batches(spec)], spec.mesh):
        batch = temperature, rows
        for model in _scored_models(policy, is_measured):
            args = (model, rows, temperature, spec.allowed_ZV)
            programs.append(Program(f"scoring {shape_of(rows)}", score, args, mesh=spec.mesh))
        programs += [
            _gradient_program(policy, model, model_state.params, *batch, targets)
            for model, model_state in pairs
        ]
    return programs


def _blank_batches(spec: PolicySpec) -> Iterator[tuple[Rows, Targets]]:
    """Yields a batch of padding of each static shape with its targets, the longest rows first."""
    layout, devices = spec.layout, data_parallel_size(spec.mesh)
    for length in reversed(layout.row_lengths):
        for count in layout.counts(length, devices):
            rows, targets = blank_rows((count, length)), _blank_targets(spec, (count, length))
            rows = rows if spec.grammars is not None else rows._replace(budget_RM=None)
            yield rows, targets
            if length >= PLAIN_FROM:
                yield rows._replace(until_RL=None), targets


def _blank_targets(spec: PolicySpec, shape: tuple[int, int]) -> Targets:
    """Returns targets of zeros, with the fields that `compute_targets` fills in."""
    o, zeros_RM = spec.objective, np.zeros(shape, np.float32)
    targets = Targets(advantage=zeros_RM, weight=zeros_RM)
    if needs_old_logps(spec):
        targets = targets._replace(old_logp=zeros_RM)
    if o.kl.where != "none":
        targets = targets._replace(ref_logp=zeros_RM)
    if o.reads("action_size", "action_gap"):
        targets = targets._replace(first=np.zeros(shape, np.int32))
    if o.critic == "none":
        return targets
    return targets._replace(old_value=zeros_RM, returns=zeros_RM, value_weight=zeros_RM)


def _scored_models(policy: Policy, is_measured: bool) -> Iterator[SplitModel]:
    """Yields the models that an update scores actions with."""
    spec, state = policy
    if needs_old_logps(spec) or is_measured:
        yield spec.policy.with_params(state.policy.params)
    if spec.objective.kl.where != "none":
        yield spec.policy.with_params(state.reference)
    if spec.critic is not None and state.critic is not None:
        yield spec.critic.with_params(state.critic.params)


def _gradient_program(
    policy: Policy, model: ModelSpec, params: Any, temperature: Any, rows: Rows, targets: Targets
) -> Program:
    spec, state = policy

    def follow(result: Gradient) -> None:
        # The metrics of several batches are summed.
        add.lower(result.sums, result.sums).compile()

    split = model.with_params(params)
    args = (split, rows, targets, temperature, state.kl_coefficient, spec.allowed_ZV)
    # Gradients are like the parameters.
    options = {"objective": spec.objective, "layout": model.layout, "total": params}
    name = f"update {shape_of(rows)}"
    return Program(name, gradient, args, options, spec.mesh, follow)
