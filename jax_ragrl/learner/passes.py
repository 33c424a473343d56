"""Passes over the batches of an update: scores of a model, and its gradient in one tree."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ragrl.learner.gradients import TokenOutputs, gradient, score, zeros
from jax_ragrl.learner.packing import Batch, Minibatches, Rows, shape_of
from jax_ragrl.learner.state import ModelSpec, Policy, PolicySpec, scalar
from jax_ragrl.learner.targets import Targets
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.progress import progress
from jax_ragrl.runtime.sharding import mesh_context, shard_batch, to_host
from jax_ragrl.runtime.small_programs import start

# Fields of `ActionScores` and the fields of a policy's `TokenOutputs` that they come from.
POLICY_FIELDS = {"logp_AT": "logp_RM", "entropy_AT": "entropy_RM"}


def model_outputs(
    spec: PolicySpec, data: Minibatches, model: ModelSpec, params: Any, fields: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Scores all batches with a model; by the new names of `fields`, float32 `[A, T]`."""
    # An array, not a Python number: another temperature uses the same program.
    temperature = scalar(spec.temperature, spec.mesh)
    split = model.with_params(params)

    def score_rows(rows: Rows) -> TokenOutputs:
        with mesh_context(spec.mesh), report_compiling(f"scoring {shape_of(rows)}"):
            outputs = score(split, rows, temperature, spec.allowed_ZV)
        spec.give_way(outputs)
        return outputs

    outputs = [
        start(functools.partial(score_rows, rows), concurrently=spec.is_concurrent(split))
        for rows in shard_batch([batch.rows for batch in data.batches], spec.mesh)
    ]
    return by_action(data, outputs, fields)


def by_action(
    data: Minibatches, outputs: Sequence[TokenOutputs], fields: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Gathers `fields` of the outputs of all batches, by their new names, float32 `[A, T]`."""
    return {
        name: data.by_action(to_host([getattr(output, field) for output in outputs]))
        for name, field in fields.items()
    }


def accumulate(
    policy: Policy,
    model: ModelSpec,
    params: Any,
    batches: Sequence[Batch],
    targets: Sequence[Targets],
) -> tuple[Any, list[dict[str, Any]], list[TokenOutputs]]:
    """Sums the gradients of one model (the policy or its critic) over batches on the host.

    Also returns the metric sums, and the policy's outputs if it was not scored, of each batch.
    """
    spec = policy.spec
    temperature = scalar(spec.temperature, spec.mesh)
    grads = zeros(params, model.layout)
    sums, outputs = list[dict[str, Any]](), list[TokenOutputs]()
    # All batches are placed in one call: several hosts then compare checksums only once.
    pairs = [(batch.rows, target) for batch, target in zip(batches, targets, strict=True)]
    with progress("update", "batch", len(pairs)) as bar:
        for rows, target in shard_batch(pairs, spec.mesh):
            # A batch counts when it is computed, not when it is started, and nothing waits for it.
            ready = (all(x.is_ready() for x in jax.tree.leaves(batch)) for batch in sums)
            bar.update(sum(itertools.takewhile(bool, ready)) - bar.done)
            with report_compiling(f"update {shape_of(rows)}"):
                grads, batch_sums, batch_outputs = gradient(
                    model.with_params(params),
                    rows,
                    target,
                    temperature,
                    policy.state.kl_coefficient,
                    spec.allowed_ZV,
                    objective=spec.objective,
                    layout=model.layout,
                    total=grads,  # donated, so there is a single tree of gradients
                )
            spec.give_way(batch_sums)
            sums.append(batch_sums)
            outputs += [] if batch_outputs is None else [batch_outputs]
    return grads, sums, outputs
