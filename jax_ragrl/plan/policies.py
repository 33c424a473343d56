"""Memory of the policies of a run per device.

Policies may differ in architecture, and train all parameters or adapters of a shared base.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.learner.gradients import gradient, layout_of
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout, Rows
from jax_ragrl.learner.targets import Targets
from jax_ragrl.models.config import DecoderConfig, compute_dtype_of, param_count
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig, adapter_weights
from jax_ragrl.models.split import SplitModel
from jax_ragrl.plan.abstract_arrays import (
    Program,
    abstract_decoder,
    batch_array,
    bytes_of,
    compile_program,
    replicated_array,
)
from jax_ragrl.plan.operations import gradient_flops
from jax_ragrl.plan.other_models import host_mesh
from jax_ragrl.plan.sampling import count_sampling
from jax_ragrl.runtime.sharding import data_parallel_size
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import SAMPLING_RULES


@dataclasses.dataclass(frozen=True)
class PlannedPolicy:
    """One policy of a plan: the name of its base, which policies with adapters may share.

    The `dtype` of its architecture is that of forward and backward passes.
    """

    name: str
    config: DecoderConfig
    lora: LoRAConfig | None = None

    def training_model(self, mesh: Mesh) -> SplitModel:
        # Full training keeps float32 weights; the base of an adapter has the compute dtype.
        dtype = "float32" if self.lora is None else self.config.dtype
        config = dataclasses.replace(self.config, param_dtype=dtype)
        return self._split(abstract_decoder(config, mesh, lora=self.lora))

    def sampling_model(self, mesh: Mesh) -> SplitModel:
        config = dataclasses.replace(self.config, param_dtype=self.config.dtype)
        return self._split(abstract_decoder(config, mesh, SAMPLING_RULES, self.lora))

    def _split(self, decoder: Decoder) -> SplitModel:
        return SplitModel.from_model(decoder, nnx.Param if self.lora is None else nnx.LoRAParam)

    def parameter_counts(self) -> dict[str, int]:
        """The number of parameters, and how many of them are trained."""
        count = param_count(self.config)
        if self.lora is None:
            return {"parameters": count, "trained": count}
        arrays = adapter_weights(self.config, self.lora).values()
        return {"parameters": count, "trained": sum(math.prod(w.shape) for w in arrays)}


def state_bytes(
    policies: Mapping[str, PlannedPolicy], objective: Objective, optimizer: Optimizer, mesh: Mesh
) -> int:
    """Permanent bytes per device.

    Counted are, per policy, float32 weights and the moments of Adam; if the objective has them, a
    reference in the compute dtype and a critic with its own moments; and each base once.
    """
    moment, critics = jnp.dtype(optimizer.moment_dtype).itemsize / 4, objective.critic == "own"
    # `bases` has one entry per base, however many adapters share it.
    total, bases = 0.0, dict[Any, int]()
    for policy in policies.values():
        model = policy.training_model(mesh)
        total += bytes_of(model.params) * (2 + moment) * (1 + critics)
        if objective.kl.where != "none":
            total += bytes_of(model.params, policy.config.dtype)
        bases[policy.name, policy.config] = bytes_of(model.frozen)
    return int(total) + sum(bases.values())


def count_updates(
    policies: Mapping[str, PlannedPolicy], objective: Objective, layout: Layout, mesh: Mesh
) -> dict[str, Any]:
    """The gradient with the largest memory; policies are updated one after the other.

    Returns:
      `rows` ([rows, length]), `temporary_bytes`, `compile_s`, `bytes`, which includes the sum of
      gradients, and per device the operations (`flops`) and the traffic of a batch.
    """
    updates = [_update(p, objective, layout, mesh) for p in _distinct(policies)]
    return max(updates, key=lambda facts: facts["bytes"])


def count_rollout(
    policies: Mapping[str, PlannedPolicy],
    shapes: Shapes,
    width: int,
    mesh: Mesh,
    *,
    nucleus: bool = True,
    outlive_update: bool = False,
) -> dict[str, Any]:
    """The batch of prompts with the largest memory, while other policies have started batches.

    Each host samples its own prompts. During a rollout there is a copy of each policy's weights, in
    the compute dtype and without FSDP. Arrays that already have this form are not copied
    (`for_sampling`), unless they `outlive_update`, which runs meanwhile. `width` and `nucleus` are
    those of `count_sampling`.

    Returns:
      `devices` of a host, its `prompts` ([prompts, length]), `width`, `prefill_tokens`,
      `compile_s`, `weight_bytes` of the copies, `temporary_bytes`, their sum `bytes`, and `prefill`
      and `decode_step`, see `count_sampling`.
    """
    options: Any = {"width": width, "rules": SAMPLING_RULES, "nucleus": nucleus}
    host = host_mesh(mesh)
    samplings = {
        p: count_sampling(shapes, p.config, host, lora=p.lora, **options)
        for p in _distinct(policies)
    }
    largest = max(samplings.values(), key=lambda facts: facts["temporary_bytes"])
    start_bytes = sum(samplings[_unnamed(policy)]["begun_bytes"] for policy in policies.values())
    weights = copy_bytes(policies, mesh, outlive_update=outlive_update)
    temporary = largest["temporary_bytes"] + start_bytes
    names = ("prompts", "width", "prefill_tokens", "compile_s", "prefill", "decode_step")
    return {
        "devices": host.size,
        **{name: largest[name] for name in names},
        "weight_bytes": weights,
        "temporary_bytes": temporary,
        "bytes": weights + temporary,
    }


def _unnamed(policy: PlannedPolicy) -> PlannedPolicy:
    """The policy without its name: policies of the same architecture share programs."""
    return dataclasses.replace(policy, name="")


def _distinct(policies: Mapping[str, PlannedPolicy]) -> list[PlannedPolicy]:
    return list(dict.fromkeys(map(_unnamed, policies.values())))


def copy_bytes(
    policies: Mapping[str, PlannedPolicy], mesh: Mesh, *, outlive_update: bool = False
) -> int:
    """Bytes per device of the weights that a rollout copies, see `count_rollout`."""
    total, bases = 0, dict[Any, int]()
    for policy in policies.values():
        original, copy = policy.training_model(mesh), policy.sampling_model(mesh)
        dtype = policy.config.dtype
        total += _copy_bytes(original.params, copy.params, dtype, always=outlive_update)
        bases[policy.name, policy.config] = _copy_bytes(original.frozen, copy.frozen, dtype)
    return total + sum(bases.values())


def _copy_bytes(original: Any, copy: Any, compute: str, *, always: bool = False) -> int:
    """Bytes of the arrays whose dtype or sharding differs in a rollout, or of all (`always`)."""

    def size(path: Any, x: Any, y: Any) -> int:
        shard, copy_shard = x.sharding.shard_shape(x.shape), y.sharding.shard_shape(y.shape)
        dtype = compute_dtype_of(path, x, compute)
        is_shared = (x.dtype, shard) == (dtype, copy_shard)
        return 0 if is_shared and not always else math.prod(copy_shard) * dtype.itemsize

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(size, original, copy)))


def _update(
    policy: PlannedPolicy, objective: Objective, layout: Layout, mesh: Mesh
) -> dict[str, Any]:
    length = max(layout.row_lengths)
    model = policy.training_model(mesh)
    count = layout.count(length, data_parallel_size(mesh))
    program = _gradient_program(model, (count, length), objective, mesh)
    # The sum of gradients is allocated before the first batch, and each gradient is added in place.
    total = program.facts["temporary_bytes"] + bytes_of(model.params)
    flops = gradient_flops(policy.config, length, adapters=policy.lora is not None)
    return {
        "rows": [count, length],
        **program.facts,
        "bytes": total,
        "flops": count * length / mesh.size * flops,
        **program.traffic().facts(),
    }


def _gradient_program(
    model: Any, shape: tuple[int, int], objective: Objective, mesh: Mesh
) -> Program:
    dtypes = (jnp.int32, jnp.float32, jnp.bool_)
    ids, number, mask = (batch_array(shape, dtype, mesh) for dtype in dtypes)
    rows = Rows(ids, ids, ids, ids, ids, mask)
    # Arrays that only some objectives need; old log-probabilities are counted in any case.
    optional = {"old_logp": number}
    if objective.kl.where == "loss":
        optional["ref_logp"] = number
    if objective.reads("action_size", "action_gap"):
        optional["first"] = ids
    scalar = replicated_array((), jnp.float32, mesh)
    targets = Targets(number, number, **optional)
    # The program gets its advantages as input: it does not depend on their estimator.
    objective = dataclasses.replace(objective, critic="none", advantage="group_centred")
    with jax.set_mesh(mesh):
        trace = gradient.lower(
            *(model, rows, targets, scalar, scalar),
            objective=objective,
            layout=layout_of(model.params),
            total=model.params,
        )
    return compile_program(trace, mesh)
