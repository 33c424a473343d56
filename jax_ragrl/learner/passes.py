"""The gradient of a model on the batches of a minibatch, summed in one tree of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jax_ragrl.learner.gradients import TokenOutputs, gradient, zeros
from jax_ragrl.learner.packing import Batch, shape_of
from jax_ragrl.learner.state import ModelSpec, Policy, scalar
from jax_ragrl.learner.targets import Targets
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.progress import progress
from jax_ragrl.runtime.sharding import shard_batch


def accumulate(
    policy: Policy,
    model: ModelSpec,
    params: Any,
    batches: Sequence[Batch],
    targets: Sequence[Targets],
) -> tuple[Any, list[dict[str, Any]], list[TokenOutputs]]:
    """Sums the gradients of one model over batches.

    Args:
      policy: objective, temperature, mesh and KL coefficient.
      model: the policy's model or its critic.
      params: the trained parameters of that model.
      batches: the batches, on the host.
      targets: the targets of each batch, on the host.

    Returns:
      The gradient, the metric sums of each batch, and per batch the policy's outputs if it was not
      scored before.
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
