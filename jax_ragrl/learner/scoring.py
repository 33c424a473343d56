"""Scores actions with a model before an update, unless the sampler's log-probabilities serve.

The old policy of an update is the policy that sampled, and the sampler reports the log-probability
of each token that it draws. With `objective.sampler_logp_gap`, these serve as old log-probabilities
and a forward pass over most tokens is saved. Still scored are

  - batches with a token that no sampler drew (forced actions, demonstrations), and
  - one batch of sampled tokens in any case, in which both are compared: beyond the allowed gap all
    batches are scored, as without the option.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from jax_ragrl.learner.gradients import TokenOutputs, score
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.packing import Batch, Minibatches, Rows, shape_of
from jax_ragrl.learner.state import ModelSpec, Policy, PolicySpec, scalar
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.multihost import is_process_zero
from jax_ragrl.runtime.sharding import mesh_context, shard_batch, to_host
from jax_ragrl.runtime.small_programs import start

# Fields of `ActionScores` and the fields of a policy's `TokenOutputs` that they come from.
POLICY_FIELDS = {"logp_AT": "logp_RM", "entropy_AT": "entropy_RM"}

# The entropy of a token that was not scored. NaN would hide entropies that are not finite.
NOT_SCORED = -np.inf


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
    return by_action(data, run_batches(spec, data.batches, model, params), fields)


def run_batches(
    spec: PolicySpec, batches: Sequence[Batch], model: ModelSpec, params: Any
) -> list[TokenOutputs]:
    """Runs a model over some batches, which stays asynchronous.

    Args:
      spec: temperature, mesh and grammar.
      batches: the batches, on the host.
      model: the model.
      params: its parameters.
    """
    # An array, not a Python number: another temperature uses the same program.
    temperature = scalar(spec.temperature, spec.mesh)
    split = model.with_params(params)

    def score_rows(rows: Rows) -> TokenOutputs:
        with mesh_context(spec.mesh), report_compiling(f"scoring {shape_of(rows)}"):
            outputs = score(split, rows, temperature, spec.allowed_ZV)
        spec.give_way(outputs)
        return outputs

    return [
        start(functools.partial(score_rows, rows), concurrently=spec.is_concurrent(split))
        for rows in shard_batch([batch.rows for batch in batches], spec.mesh)
    ]


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


def sampler_may_serve(o: Objective) -> bool:
    """Whether the log-probabilities of the sampler may take the place of old ones.

    Not if the pass is run anyway for the values of a shared critic, nor if importance weights
    compare both.
    """
    return o.sampler_logp_gap > 0 and o.critic != "shared" and not o.importance_weight_cap


def old_outputs(policy: Policy, data: Minibatches) -> dict[str, np.ndarray]:
    """Returns log-probabilities before the update, entropies and values of a shared critic.

    Entropies are `NOT_SCORED` in batches that were not scored.

    Args:
      policy: the policy before the update.
      data: the batches.

    Returns:
      Names of `ActionScores` with float32 `[A, T]`.
    """
    spec, params = policy.spec, policy.state.policy.params
    value_fields = {"value_AT": "value_RM"} if spec.objective.critic == "shared" else {}
    run = functools.partial(run_batches, spec, model=spec.policy, params=params)
    if not sampler_may_serve(spec.objective):
        return by_action(data, run(data.batches), POLICY_FIELDS | value_fields)
    # 1. Score tokens that the sampler did not draw, and measure the gap.
    numbers = batches_to_score(data.batches)
    outputs = _score_some(data, numbers, run)
    gap = _largest_gap(data, outputs)
    # 2. Score the rest if the gap is too large.
    if not gap <= spec.objective.sampler_logp_gap:  # also if it is NaN
        _report_gap(gap, spec.objective.sampler_logp_gap)
        outputs |= _score_some(data, [i for i in range(len(data.batches)) if i not in outputs], run)
    whole = [outputs.get(i) or _of_sampler(batch) for i, batch in enumerate(data.batches)]
    return {
        name: data.by_action(values)
        for name, values in zip(POLICY_FIELDS, zip(*whole, strict=True), strict=True)
    }


# Log-probabilities and entropies of a batch on the host, float32 `[R, M]`.
BatchScores = tuple[np.ndarray, np.ndarray]


def _score_some(
    data: Minibatches,
    numbers: Sequence[int],
    run: Callable[[Sequence[Batch]], list[TokenOutputs]],
) -> dict[int, BatchScores]:
    """Scores the batches of some numbers."""
    outputs = run([data.batches[i] for i in numbers])
    pairs = to_host([tuple(getattr(x, f) for f in POLICY_FIELDS.values()) for x in outputs])
    return dict(zip(numbers, pairs, strict=True))


def batches_to_score(batches: Sequence[Batch]) -> list[int]:
    """Returns the batches with tokens that no sampler drew, and at least one with sampled tokens.

    Args:
      batches: all batches of an update.

    Returns:
      Their numbers, ascending.
    """
    by_sampler = [~np.isnan(b.behaviour_logp_RM) & b.rows.mask_RM for b in batches]
    numbers = [i for i, b in enumerate(batches) if (b.rows.mask_RM & ~by_sampler[i]).any()]
    with_samples = [i for i, known_RM in enumerate(by_sampler) if known_RM.any()]
    if not set(numbers) & set(with_samples):
        numbers += with_samples[:1]
    return sorted(numbers)


def _largest_gap(data: Minibatches, outputs: Mapping[int, BatchScores]) -> float:
    """The largest difference of both log-probabilities in the batches that were scored, or NaN."""
    gaps = [0.0]
    for i, (logp_RM, _) in outputs.items():
        behaviour_RM = data.batches[i].behaviour_logp_RM
        known_RM = data.batches[i].rows.mask_RM & ~np.isnan(behaviour_RM)
        gaps.append(float(np.abs(logp_RM - behaviour_RM)[known_RM].max(initial=0)))
    return float(np.max(gaps))


def _of_sampler(batch: Batch) -> BatchScores:
    """The log-probabilities of a batch whose tokens were all sampled; entropies are unknown."""
    logp_RM = np.where(batch.rows.mask_RM, batch.behaviour_logp_RM, 0)
    return logp_RM, np.full_like(logp_RM, NOT_SCORED)


def _report_gap(gap: float, limit: float) -> None:
    if is_process_zero():
        message = (
            f"log-probabilities of sampler and learner differ by {gap:.2g} nats, above "
            f"objective.sampler_logp_gap={limit:g}: all tokens of this update are scored"
        )
        tqdm.tqdm.write(message, file=sys.stderr)
