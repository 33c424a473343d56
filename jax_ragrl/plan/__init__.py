"""What a run needs of each device, asked of the compiler: without weights, and without the device.

The programs of a run (the gradient of a batch of rows, the sampling of a batch of prompts) are
compiled ahead of time for a mesh of described devices. What stays there between them is counted
from shapes and layouts: the state of the policies, and beside it an exact index, its encoder and
frozen language models, where their folders are on this machine. Whatever else a config has on the
devices is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.learner.dpo import Preference
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.models import hub
from jax_ragrl.models.by_name import PACKAGED
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.models.published import shape
from jax_ragrl.plan.other_models import count_beside, shape_by_name
from jax_ragrl.plan.policies import Trained, count_rollout, count_updates, state_bytes
from jax_ragrl.run.config import LLM, Index, load_recipe
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.topology import memory_of
from jax_ragrl.sampling.sampler import Shapes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is planned; the fields are those of a run's config that decide about memory.

    `mesh` is (data, fsdp, tensor), an entry of -1 takes what is left of the devices. `width` is how
    many actions are sampled at most after one prompt, `learners` are the policies by name. `policy`
    is the folder of those that `policies` does not name.
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
    learners: tuple[str, ...] = ("policy",)
    index: Index = Index()
    llm: LLM = LLM()
    judge: LLM = LLM("none")
    lora: LoRAConfig | None = None
    policy: str | None = None
    policies: tuple[tuple[str, str], ...] = ()
    preference: Preference | None = None


def plan(run: Plan, config: DecoderConfig, devices: Sequence[Any]) -> dict[str, Any]:
    """Bytes of each device: what stays (`state`, `beside`), and what each program takes then.

    `config` is that of policies to which `run.policies` gives no folder, or no published name, of
    their own. `state` is told at `state_bytes`, the copies for a rollout at `count_rollout`.
    `beside` are an exact index, its encoder and local language models. `peak_bytes` is the largest
    of the programs on top of what stays; `fits` compares it with the device's memory. Policies and
    critics are updated one after the other, a critic by a program like its policy's, so that one
    gradient is counted.

    `uncounted` says what the config has on the devices that is not in these numbers, or is counted
    as something else. `fits` is then None, unless what is counted is too much already and only
    more would come; and it is None where the memory is not known.
    """
    mesh = make_mesh(run.mesh or (1, -1, 1), devices)
    policies, other = policies_of(run, config)
    if run.preference is not None:
        other.append("preference: an update by pairs, counted as one by the objective")
    update = count_updates(policies, run.objective, run.layout, mesh)
    sampled = count_rollout(policies, run.shapes, run.width, mesh)
    more = count_beside(run.index, {"llm": run.llm, "judge": run.judge}, run.shapes, mesh)
    state = state_bytes(policies, run.objective, run.optimizer, mesh)
    rollout = max(sampled["bytes"], sampled["weight_bytes"] + more.writing)
    peak = state + more.lasting + max(update["bytes"], rollout)
    memory = memory_of(devices[0])
    known = memory is not None and not other and not (peak < memory and more.uncounted)
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "policies": {name: policy.facts() for name, policy in policies.items()},
        "state_bytes": state,
        "update": update,
        "sampling": sampled,
        "beside": more.parts,
        "uncounted": more.uncounted + other,
        "peak_bytes": peak,
        "memory_bytes": memory,
        "fits": peak < memory if memory and known else None,
    }


def policies_of(run: Plan, config: DecoderConfig) -> tuple[dict[str, Trained], list[str]]:
    """The policies of a run, whose config is `config` where `policies` names no other; and what of
    them is not known.

    Raises:
      UserError: `policies` names one that the system does not have.
    """
    folders, unknown = dict(run.policies), []
    if strange := [name for name in folders if name not in run.learners]:
        has = ", ".join(run.learners)
        raise UserError(f"policies names {strange[0]!r}: this system has {has}")
    found = {}
    for name in run.learners:
        own = config
        try:
            own = shape_of(folders[name]) if name in folders else config
        except UserError as error:
            unknown.append(f"policies.{name}: counted as --shape ({error})")
        computed = {"dtype": run.compute, "remat": run.remat, "attention_impl": run.attention}
        own = dataclasses.replace(own, **computed)  # type: ignore[arg-type]
        found[name] = Trained(folders.get(name, run.policy or ""), own, run.lora)
    return found, unknown


def shape_of(name: str) -> DecoderConfig:
    """The shape of a decoder by its name: a published one that is known here, or a model's own.

    Raises:
      UserError: it is neither, or the model is not a decoder of a supported family.
    """
    if name in PACKAGED or local(name).exists():
        return shape_by_name(name)
    try:
        return shape(name)
    except UserError:
        if not hub.NAME.fullmatch(name):
            raise
        return shape_by_name(name)


def plan_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan that a run's config has, and those that its system's recipe decides."""
    names = {field.name for field in dataclasses.fields(Plan)}
    given = {name: value for name, value in values.items() if name in names}
    for name in given.keys() & {"index", "llm", "judge"}:
        given[name] = _named(given[name])
    return given | (_of_system(dict(values)) if "system" in values else {})


def _of_system(values: dict[str, Any]) -> dict[str, Any]:
    recipe = load_recipe(values | {"recipe": _named(values.get("recipe", {}))})
    policies = sorted({role.policy for role in recipe.system.roles.values()})
    return {"width": recipe.width, "learners": tuple(policies)}


def _named(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section in which what a user has yet to name, such as a file, is empty and not None."""
    return {key: "" if x is None else x for key, x in section.items()}
