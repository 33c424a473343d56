"""What a run needs of each device, asked of the compiler: without weights, and without the device.

The programs of a run (the gradient of a batch of rows, the sampling of a batch of prompts) are
compiled ahead of time for a mesh of described devices. What stays there between them is counted
from shapes and layouts: the state of the policies, all of one shape and trained whole, and beside
it an exact index, its encoder and frozen language models, where their folders are on this machine.
Whatever else a config has on the devices is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.batch import Layout, Rows
from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig, param_count
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.plan.beside import count_beside, local_shape
from jax_ragrl.plan.described import abstract, attending, batch, bytes_of, compiled, whole
from jax_ragrl.plan.sampling import count_sampling
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sharding import Rules, make_mesh, ways
from jax_ragrl.topology import memory_of
from jax_ragrl.train.dpo import Preference
from jax_ragrl.train.job import LLM, Index, load_recipe
from jax_ragrl.train.objective import Objective
from jax_ragrl.train.optimizer import Optimizer
from jax_ragrl.train.step import gradient, layout_of
from jax_ragrl.train.targets import Targets


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is planned; the fields are those of a run's config that decide about memory.

    `mesh` is (data, fsdp, tensor), an entry of -1 takes what is left of the devices. `width` is how
    many actions are sampled at most after one prompt, `learners` how many policies are trained.
    """

    objective: Objective
    optimizer: Optimizer
    shapes: Shapes = Shapes()
    layout: Layout = Layout()
    mesh: tuple[int, ...] = (1, -1, 1)
    compute: str = "bfloat16"
    remat: str = "full"
    attention: str = "auto"
    width: int = 1
    learners: int = 1
    index: Index = Index()
    llm: LLM = LLM()
    judge: LLM = LLM("none")
    lora: LoRAConfig | None = None
    policies: tuple[tuple[str, str], ...] = ()
    preference: Preference | None = None


def plan(run: Plan, config: DecoderConfig, devices: Sequence[Any]) -> dict[str, Any]:
    """Bytes of each device: what stays (`state`, `beside`), and what each program takes then.

    `state` holds of each policy float32 weights, both moments of Adam, and, where the objective has
    them, a reference in the dtype of `compute` and a critic with moments of its own. While a
    rollout lasts, a copy of each policy's weights is there for it: in the dtype that it computes
    in, and whole on the devices that share a batch. `beside` are an exact index, its encoder and
    local language models. `peak_bytes` is the largest of the programs on top of what stays; `fits`
    compares it with the device's memory. Policies and critics are updated one after the other, a
    critic by a program like its policy's, so that one gradient is counted.

    `uncounted` says what the config has on the devices that is not in these numbers, or is counted
    as something else. `fits` is then None, unless what is counted is too much already and only
    more would come; and it is None where the memory is not known.
    """
    mesh = make_mesh(run.mesh or (1, -1, 1), devices)
    computed = {"dtype": run.compute, "remat": run.remat, "attention_impl": run.attention}
    config = dataclasses.replace(config, param_dtype="float32", **computed)  # type: ignore[arg-type]
    update = _update(run, config, mesh)
    acting = {"width": run.width, "learners": run.learners, "rules": Rules(embed=None)}
    sampled = count_sampling(run.shapes, config, mesh, **acting)  # type: ignore[arg-type]
    more = count_beside(run.index, {"llm": run.llm, "judge": run.judge}, run.shapes, mesh)
    other = _counted_as_other(run, config)
    state = run.learners * _state_bytes(run, abstract(config, mesh)[1])
    rollout = max(sampled["bytes"], sampled["weight_bytes"] + more.writing)
    peak = state + more.lasting + max(update["bytes"], rollout)
    memory = memory_of(devices[0])
    known = memory is not None and not other and not (peak < memory and more.uncounted)
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "parameters": param_count(config),
        "policies": run.learners,
        "state_bytes": state,
        "update": update,
        "sampling": sampled,
        "beside": more.parts,
        "uncounted": more.uncounted + other,
        "peak_bytes": peak,
        "memory_bytes": memory,
        "fits": peak < memory if memory and known else None,
    }


def _counted_as_other(run: Plan, config: DecoderConfig) -> list[str]:
    """What of a run takes other memory than is planned for it, more or less."""
    found = []
    if run.lora is not None:
        found.append("lora: counted as policies that are trained whole")
    for name, folder in run.policies:
        try:
            if param_count(local_shape(folder)) != param_count(config):
                found.append(f"policies.{name}: another shape, counted as --shape")
        except UserError as error:
            found.append(f"policies.{name}: counted as --shape ({error})")
    if run.preference is not None:
        found.append("preference: an update by pairs, counted as one by the objective")
    return found


def _state_bytes(run: Plan, params: Any) -> int:
    weights, moment = bytes_of(params), jnp.dtype(run.optimizer.moments).itemsize / 4
    learner = weights * (2 + moment)  # weights and second moments are float32
    critics = run.objective.critic == "own"
    reference = bytes_of(params, run.compute) if run.objective.kl.where != "none" else 0
    return int(learner * (1 + critics) + reference)


def _update(run: Plan, config: DecoderConfig, mesh: Mesh) -> dict[str, Any]:
    """The gradient of the longest rows, every token of which may be scored."""
    length = max(run.layout.lengths)
    graph, params = abstract(attending(config, length, mesh), mesh)
    count = run.layout.count(length, ways(mesh))

    def rows_of(dtype: Any) -> jax.ShapeDtypeStruct:
        return batch((count, length), dtype, mesh)

    ids, number = rows_of(jnp.int32), rows_of(jnp.float32)
    rows = Rows(ids, ids, ids, ids, ids, rows_of(jnp.bool_))
    optional = {"old_logp": number}
    if run.objective.kl.where == "loss":
        optional["ref_logp"] = number
    scalar = whole((), jnp.float32, mesh)
    targets = Targets(number, number, **optional)
    objective = dataclasses.replace(run.objective, critic="none", advantage="group_centred")
    with jax.set_mesh(mesh):
        traced = gradient.lower(
            *(graph, params, nnx.State({}), rows, targets, scalar, scalar),
            objective=objective,
            layout=layout_of(params),
            total=params,
        )
    facts, _ = compiled(traced, mesh)
    # The sum of gradients is there before the first batch, and each is added to it in place.
    total = facts["temporary_bytes"] + bytes_of(params)
    return {"rows": [count, length], **facts, "bytes": total}


def plan_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan that a run's config has, and those that its system's recipe decides."""
    names = {field.name for field in dataclasses.fields(Plan)}
    given = {name: value for name, value in values.items() if name in names}
    for name in given.keys() & {"index", "llm", "judge"}:
        given[name] = _named(given[name])
    return given | (_of_system(dict(values)) if "system" in values else {})


def _of_system(values: dict[str, Any]) -> dict[str, int]:
    recipe = load_recipe(values | {"recipe": _named(values.get("recipe", {}))})
    policies = {role.policy for role in recipe.system.roles.values()}
    return {"width": recipe.width, "learners": len(policies)}


def _named(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section in which what a user has yet to name, such as a file, is empty and not None."""
    return {key: "" if x is None else x for key, x in section.items()}
