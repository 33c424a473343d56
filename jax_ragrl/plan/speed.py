"""Least times of the programs of a plan, the number of programs, and the size of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import PLAIN_FROM, Layout
from jax_ragrl.learner.update import scores_before_update
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.plan.operations import gradient_flops, score_flops, time_at_least
from jax_ragrl.plan.policies import PlannedPolicy
from jax_ragrl.runtime.sharding import data_parallel_size
from jax_ragrl.runtime.topology import Ceilings
from jax_ragrl.sampling.grouping import rest_lengths
from jax_ragrl.sampling.sampler import Shapes


def least_times(
    update: Mapping[str, Any], sampling: Mapping[str, Any], devices: int, ceilings: Ceilings
) -> dict[str, Any]:
    """Returns the least seconds and the most tokens per second of each part of a step.

    `update` and `sampling` are of `count_updates` and `count_rollout`.

    Returns:
      `gradient` (of a batch), `prefill` (of a batch) and `decode_step` (of a token of each row),
      each with `seconds_at_least`, `bound` and `tokens_per_s_at_most` of all devices.
    """
    prompts, _ = sampling["prompts"]
    hosts = devices / sampling["devices"]
    rows, row_length = update["rows"]
    work = {
        "gradient": (update, rows * row_length),
        "prefill": (sampling["prefill"], hosts * sampling["prefill_tokens"]),
        "decode_step": (sampling["decode_step"], hosts * prompts * sampling["width"]),
    }
    times = {}
    for name, (part, tokens) in work.items():
        time = time_at_least(part, ceilings)
        times[name] = time | {"tokens_per_s_at_most": round(tokens / time["seconds_at_least"])}
    return {"ceilings": ceilings._asdict() | {"devices": devices}, **times}


def update_passes(
    config: DecoderConfig,
    objective: Objective,
    optimizer: Optimizer,
    length: int,
    *,
    lora: bool,
    is_measured: bool = False,
) -> dict[str, Any]:
    """Returns how often an update runs each pass over its tokens, and the operations per token.

    `length` are the tokens of a row; with `lora` only an adapter is trained; if `is_measured`, the
    guard scores the batch after the update (`guard.update_kl`).
    """
    # A separate critic repeats the passes of its policy.
    own_critic = objective.critic == "own"
    gradients = optimizer.epochs * (1 + own_critic)
    references = objective.kl.where != "none"
    scores = scores_before_update(objective, optimizer) + references + own_critic + is_measured
    gradient = gradient_flops(config, length, adapters=lora)
    score = score_flops(config, length)
    return {
        "gradients": gradients,
        "scores": scores,
        "gradient_flops_per_token": gradient,
        "flops_per_token": gradients * gradient + scores * score,
    }


def count_programs(
    shapes: Shapes,
    packing: Layout,
    objective: Objective,
    width: int,
    host: Mesh,
    rollouts: int = 1,
) -> dict[str, int]:
    """Returns how many programs a run compiles at most for one policy.

    `width` are the continuations per prompt, `host` the devices that sample together; the first
    prompts of all `rollouts` of a question are equal.

    Returns:
      `sampler`: per prompt length, batch size and number of equal prompts a program that runs
      prompts, and one that decodes for each size of the cache. `update`: per batch shape a gradient
      and a score, for the policy and an own critic.
    """
    # Batches are cut into equal shards, so the number of devices determines their sizes.
    devices = data_parallel_size(host)
    cache_sizes = len(shapes.cache_sizes_for(shapes.max_new_tokens))
    keeps = shapes.kept_contexts > 0 and devices == 1
    sampler = sum(
        len(shapes.batch_sizes_for(length, devices, copies))
        * (cache_sizes + (len(rest_lengths(length)) if keeps else 1))
        for length in shapes.prompt_lengths
        for copies in shapes.copies_up_to(rollouts)
    )
    sampler *= len({1, width})  # an evaluation and a forced beginning sample one action
    rows = sum(
        (1 + packing.max_batch_halvings) * (2 if length >= PLAIN_FROM else 1)
        for length in packing.row_lengths
    )
    models = 2 if objective.critic == "own" else 1
    return {"sampler": sampler, "update": rows * 2 * models}


def compile_seconds(
    programs: Mapping[str, int],
    update: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> float:
    """Returns the seconds of compiling all programs of a run one by one, as this machine did.

    As if each took as long as the largest one of its kind, which the plan has compiled; a score
    takes less than the gradient that stands for it. Arguments are those of `count_programs`,
    `count_updates` and `count_rollout`.
    """
    # The plan has compiled a program that runs prompts, and one that decodes.
    each = {"sampler": sampling["compile_s"] / 2, "update": update["compile_s"]}
    return round(sum(programs[kind] * seconds for kind, seconds in each.items()), 1)


def checkpoint_bytes(
    policies: Mapping[str, PlannedPolicy], objective: Objective, optimizer: Optimizer
) -> int:
    """Returns the bytes of one checkpoint on disk, without compression.

    It holds float32 weights, two moments and a reference of each policy, and a critic's weights and
    moments; of adapters only these, not their base.
    """
    # The second moment stays in float32 whatever the dtype of the first.
    moments = 4 + jnp.dtype(optimizer.moment_dtype).itemsize
    models, total = 1 + (objective.critic == "own"), 0
    for policy in policies.values():
        weights = policy.parameter_counts()["trained"]
        reference = jnp.dtype(policy.config.dtype).itemsize * (objective.kl.where != "none")
        total += weights * ((4 + moments) * models + reference)
    return total
