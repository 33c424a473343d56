"""Scores actions with a model, before and after an update."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.learner.gradients import TokenOutputs, score
from jax_ragrl.learner.packing import Minibatches, Rows, shape_of
from jax_ragrl.learner.state import ModelSpec, PolicySpec, scalar
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.sharding import mesh_context, shard_batch, to_host
from jax_ragrl.runtime.small_programs import start

# Fields of `ActionScores` and the fields of a policy's `TokenOutputs` that they come from.
POLICY_FIELDS = {"logp_AT": "logp_RM", "entropy_AT": "entropy_RM"}


def model_outputs(
    spec: PolicySpec, data: Minibatches, model: ModelSpec, params: Any, fields: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Runs a model over all batches.

    Args:
      spec: temperature, mesh and grammar.
      data: the batches.
      model: the model.
      params: its parameters.
      fields: maps new names to fields of `TokenOutputs`.

    Returns:
      By new name, float32 `[A, T]`.
    """
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
    """Gathers fields of the outputs of all batches by action, float32 `[A, T]`.

    Args:
      data: the batches.
      outputs: the outputs of each batch.
      fields: maps new names to fields of `TokenOutputs`.
    """
    return {
        name: data.by_action(to_host([getattr(output, field) for output in outputs]))
        for name, field in fields.items()
    }
