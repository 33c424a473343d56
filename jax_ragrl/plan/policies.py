"""What the policies of a run take of each device: of one shape or of several, trained whole or as
adapters beside a base that they share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.learner.gradients import gradient, layout_of
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout, Rows
from jax_ragrl.learner.targets import Targets
from jax_ragrl.models.config import DecoderConfig, param_count, used_as
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig, adapter_weights
from jax_ragrl.plan.abstract_arrays import abstract, attending, batch, bytes_of, compiled, whole
from jax_ragrl.plan.sampling import count_sampling
from jax_ragrl.runtime.sharding import Rules, ways
from jax_ragrl.sampling.sampler import Shapes

GATHERED = Rules(embed=None)  # weights as a rollout has them: whole where a batch is split


class Parts(NamedTuple):
    """A described policy as it is trained."""

    graph: Any
    params: Any
    frozen: Any


@dataclasses.dataclass(frozen=True)
class Trained:
    """One policy: its decoder, and the adapter that is trained in its place, if any.

    The config's `dtype` is that of its passes. Policies with adapters share the base of one `name`.
    """

    name: str
    config: DecoderConfig
    lora: LoRAConfig | None = None

    def stored(self) -> DecoderConfig:
        """Its config in the dtype that its weights are kept in."""
        dtype = "float32" if self.lora is None else self.config.dtype
        return dataclasses.replace(self.config, param_dtype=dtype)

    def parts(self, mesh: Mesh, length: int = 1) -> Parts:
        """Its parameters over a mesh, with the attention of rows of a length."""
        return self._split(abstract(attending(self.stored(), length, mesh), mesh, lora=self.lora))

    def acting(self, mesh: Mesh) -> Parts:
        """Its parameters as a rollout takes them."""
        config = dataclasses.replace(self.config, param_dtype=self.config.dtype)
        return self._split(abstract(config, mesh, GATHERED, self.lora))

    def _split(self, decoder: Decoder) -> Parts:
        return Parts(*nnx.split(decoder, nnx.Param if self.lora is None else nnx.LoRAParam, ...))

    def facts(self) -> dict[str, int]:
        """How many parameters it has, and how many of them are trained."""
        count = param_count(self.config)
        if self.lora is None:
            return {"parameters": count, "trained": count}
        arrays = adapter_weights(self.config, self.lora).values()
        return {"parameters": count, "trained": sum(math.prod(w.shape) for w in arrays)}


def state_bytes(
    policies: Mapping[str, Trained], objective: Objective, optimizer: Optimizer, mesh: Mesh
) -> int:
    """Bytes that stay: of each policy float32 weights and the moments of Adam; where the objective
    has them, a reference in the dtype of its passes and a critic with moments of its own; and each
    base below adapters once."""
    moment, critics = jnp.dtype(optimizer.moments).itemsize / 4, objective.critic == "own"
    total, bases = 0.0, dict[Any, int]()
    for policy in policies.values():
        parts = policy.parts(mesh)
        total += bytes_of(parts.params) * (2 + moment) * (1 + critics)
        if objective.kl.where != "none":
            total += bytes_of(parts.params, policy.config.dtype)
        bases[policy.name, policy.config] = bytes_of(parts.frozen)
    return int(total) + sum(bases.values())


def count_updates(
    policies: Mapping[str, Trained], objective: Objective, layout: Layout, mesh: Mesh
) -> dict[str, Any]:
    """The gradient that takes most. Policies are updated one after the other."""
    found = {p: _update(p, objective, layout, mesh) for p in _distinct(policies)}
    return max(found.values(), key=lambda facts: facts["bytes"])


def count_rollout(
    policies: Mapping[str, Trained], shapes: Shapes, width: int, mesh: Mesh
) -> dict[str, Any]:
    """The batch of prompts that takes most, beside those of the other policies, which have begun.

    While a rollout lasts a copy of each policy's weights is there: in the dtype of its passes, and
    whole on the devices that share a batch. What is so already is not copied (`for_sampling`).
    """
    found = {p: _sampling(p, shapes, width, mesh) for p in _distinct(policies)}
    most = max(found.values(), key=lambda facts: facts["temporary_bytes"])
    begun = sum(found[_shape(policy)]["begun_bytes"] for policy in policies.values())
    weights = copied_bytes(policies, mesh)
    temporary = most["temporary_bytes"] + begun
    return {
        **{name: most[name] for name in ("prompts", "width", "compile_s")},
        "weight_bytes": weights,
        "temporary_bytes": temporary,
        "bytes": weights + temporary,
    }


def _shape(policy: Trained) -> Trained:
    """Without its name: policies of one shape have one program."""
    return dataclasses.replace(policy, name="")


def _distinct(policies: Mapping[str, Trained]) -> list[Trained]:
    return list(dict.fromkeys(map(_shape, policies.values())))


def _sampling(policy: Trained, shapes: Shapes, width: int, mesh: Mesh) -> dict[str, Any]:
    given = {"width": width, "rules": GATHERED, "lora": policy.lora}
    return count_sampling(shapes, policy.config, mesh, **given)  # type: ignore[arg-type]


def copied_bytes(policies: Mapping[str, Trained], mesh: Mesh) -> int:
    """Bytes of the weights that a rollout has copies of."""
    total, bases = 0, dict[Any, int]()
    for policy in policies.values():
        kept, taken = policy.parts(mesh), policy.acting(mesh)
        total += _copied(kept.params, taken.params, policy.config.dtype)
        frozen = _copied(kept.frozen, taken.frozen, policy.config.dtype)
        bases[policy.name, policy.config] = frozen
    return total + sum(bases.values())


def _copied(kept: Any, taken: Any, compute: str) -> int:
    """Bytes of the arrays that lie in another dtype, or otherwise, than they are taken in."""

    def size(path: Any, x: Any, y: Any) -> int:
        form, wanted = x.sharding.shard_shape(x.shape), y.sharding.shard_shape(y.shape)
        dtype = used_as(path, x, compute)
        return 0 if (x.dtype, form) == (dtype, wanted) else math.prod(wanted) * dtype.itemsize

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(size, kept, taken)))


def _update(policy: Trained, objective: Objective, layout: Layout, mesh: Mesh) -> dict[str, Any]:
    """The gradient of the longest rows, every token of which may be scored."""
    length = max(layout.lengths)
    parts = policy.parts(mesh, length)
    count = layout.count(length, ways(mesh))

    def rows_of(dtype: Any) -> jax.ShapeDtypeStruct:
        return batch((count, length), dtype, mesh)

    ids, number = rows_of(jnp.int32), rows_of(jnp.float32)
    rows = Rows(ids, ids, ids, ids, ids, rows_of(jnp.bool_))
    optional = {"old_logp": number}
    if objective.kl.where == "loss":
        optional["ref_logp"] = number
    scalar = whole((), jnp.float32, mesh)
    targets = Targets(number, number, **optional)
    objective = dataclasses.replace(objective, critic="none", advantage="group_centred")
    with jax.set_mesh(mesh):
        traced = gradient.lower(
            *(*parts, rows, targets, scalar, scalar),
            objective=objective,
            layout=layout_of(parts.params),
            total=parts.params,
        )
    facts, _ = compiled(traced, mesh)
    # The sum of gradients is there before the first batch, and each is added to it in place.
    total = facts["temporary_bytes"] + bytes_of(parts.params)
    return {"rows": [count, length], **facts, "bytes": total}
