"""What a run needs of each device, asked of the compiler: without weights, and without the device.

The programs of a run (the gradient of a batch of rows, the sampling of a batch of prompts) are
compiled ahead of time for a mesh of described devices. What stays there between them is counted
from shapes and layouts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ragrl.batch import Layout, Rows
from jax_ragrl.errors import UserError
from jax_ragrl.models.decoder import (
    Decoder,
    DecoderConfig,
    abstract_params,
    logical_axes,
    param_count,
)
from jax_ragrl.sampling.decode import Prompts, generate
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sharding import Rules, make_mesh, to_sharding, tree_shardings, ways
from jax_ragrl.train.objective import Objective
from jax_ragrl.train.optimizer import Optimizer
from jax_ragrl.train.step import gradient, layout_of
from jax_ragrl.train.targets import Targets

# Memory of a device by the kind that the compiler names, in GiB.
MEMORY_GIB = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is planned; the fields are those of a run's config that decide about memory.

    `mesh` is (data, fsdp, tensor), an entry of -1 takes what is left of the devices.
    """

    objective: Objective
    optimizer: Optimizer
    shapes: Shapes = Shapes()
    layout: Layout = Layout()
    mesh: tuple[int, ...] = (1, -1, 1)
    compute: str = "bfloat16"
    remat: str = "full"


def describe_devices(topology: str) -> list[Any]:
    """The devices of a TPU topology such as `v5e:4x4`, without having them.

    Raises `UserError` where the name is not known or libtpu is not installed.
    """
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:
        told = str(error).splitlines()[0]
        raise UserError(
            f"no topology {topology!r} ({told}): install libtpu and name one like v5e:4x4, "
            "v5p:2x2x4 or v6e:8x8"
        ) from error


def plan(run: Plan, config: DecoderConfig, devices: Sequence[Any]) -> dict[str, Any]:
    """Bytes of each device: what stays (`state`), and what each program takes beside it.

    `state` holds float32 weights, both moments of Adam, and, where the objective has them, a
    reference and a critic with moments of its own. `peak_bytes` is the larger of both programs on
    top of it; `fits` compares it with the device's memory, None where that is not known.
    """
    mesh = make_mesh(run.mesh or (1, -1, 1), devices)
    config = dataclasses.replace(
        config, dtype=run.compute, param_dtype="float32", remat=run.remat, attention_impl="xla"
    )
    net = _abstract(config, mesh)
    # What `sampling.weights` makes of it.
    acting = _abstract(
        dataclasses.replace(config, param_dtype=run.compute), mesh, Rules(embed=None)
    )
    update, sampling = _update(run, net, mesh), _sampling(run, net, acting, mesh)
    state = _state_bytes(run, net[1])
    peak = state + max(update["bytes"], sampling["bytes"])
    kind = devices[0].device_kind
    memory = MEMORY_GIB.get(kind, 0) * 2**30
    return {
        "device": kind,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "parameters": param_count(config),
        "state_bytes": state,
        "update": update,
        "sampling": sampling,
        "peak_bytes": peak,
        "memory_bytes": memory or None,
        "fits": peak < memory if memory else None,
    }


def _abstract(config: DecoderConfig, mesh: Mesh, rules: Rules | None = None) -> tuple[Any, Any]:
    """A split decoder whose parameters are shapes with layouts."""
    shapes = abstract_params(config)
    layouts = tree_shardings(logical_axes(config), shapes, mesh, rules)

    def placed(x: Any, layout: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    decoder = Decoder.from_params(config, jax.tree.map(placed, shapes, layouts))
    graph, params = nnx.split(decoder, nnx.Param)
    return graph, params


def _state_bytes(run: Plan, params: Any) -> int:
    weights, moment = _bytes(params), jnp.dtype(run.optimizer.moments).itemsize / 4
    learner = weights * (2 + moment)  # weights and second moments are float32
    critics = run.objective.critic == "own"
    references = run.objective.kl.where != "none"
    return int(learner * (1 + critics) + weights * references)


def _bytes(tree: Any) -> int:
    """Bytes that a device holds of arrays."""
    sizes = (
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
    return sum(sizes)


def _update(run: Plan, net: tuple[Any, Any], mesh: Mesh) -> dict[str, Any]:
    """The gradient of the longest rows, every token of which may be scored."""
    graph, params = net
    length = max(run.layout.lengths)
    count = run.layout.count(length, ways(mesh))

    def rows_of(dtype: Any) -> jax.ShapeDtypeStruct:
        return _batch((count, length), dtype, mesh)

    ids, number = rows_of(jnp.int32), rows_of(jnp.float32)
    rows = Rows(ids, ids, ids, ids, ids, rows_of(jnp.bool_))
    optional = {"old_logp": number}
    if run.objective.kl.where == "loss":
        optional["ref_logp"] = number
    scalar = _whole((), jnp.float32, mesh)
    targets = Targets(number, number, **optional)
    objective = dataclasses.replace(run.objective, critic="none", advantage="group_centred")
    with jax.set_mesh(mesh):
        traced = gradient.lower(
            *(graph, params, nnx.State({}), rows, targets, scalar, scalar),
            objective=objective,
            layout=layout_of(params),
        )
    facts = _compiled(traced)
    # A second batch's gradient is added to the first one's.
    grads = _bytes(params)
    return {"rows": [count, length], **facts, "bytes": facts["temporary_bytes"] + 2 * grads}


def _sampling(
    run: Plan, net: tuple[Any, Any], acting: tuple[Any, Any], mesh: Mesh
) -> dict[str, Any]:
    """The largest batch of the longest prompts, one continuation each, and the weights for it."""
    graph, params = acting
    length = max(run.shapes.lengths)
    count = -(-run.shapes.most(length) // ways(mesh)) * ways(mesh)

    def column(dtype: Any) -> jax.ShapeDtypeStruct:
        return _batch((count,), dtype, mesh)

    prompts = Prompts(
        ids_BP=_batch((count, length), jnp.int32, mesh),
        length_B=column(jnp.int32),
        seed_B=column(jnp.uint32),
        temperature_B=column(jnp.float32),
        top_p_B=column(jnp.float32),
        limit_B=column(jnp.int32),
    )
    stops = _whole((2,), jnp.int32, mesh)
    with jax.set_mesh(mesh):
        traced = generate.lower(graph, params, prompts, stops, width=1, steps=run.shapes.steps)
    facts = _compiled(traced)
    pairs = zip(jax.tree.leaves(net[1]), jax.tree.leaves(params), strict=True)
    weights = _bytes([to for x, to in pairs if not _alike(x, to)])
    taken = {"weights_bytes": weights, "bytes": facts["temporary_bytes"] + weights}
    return {"prompts": [count, length], **facts, **taken}


def _alike(x: Any, to: Any) -> bool:
    return x.dtype == to.dtype and x.sharding.is_equivalent_to(to.sharding, x.ndim)


def _batch(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    names = ("batch",) + (None,) * (len(shape) - 1)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=to_sharding(names, shape, mesh))


def _whole(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _compiled(traced: Any) -> dict[str, Any]:
    """What the compiler says of a program: bytes beside its arguments, seconds to compile."""
    begun = time.perf_counter()
    memory = traced.compile().memory_analysis()
    return {
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "compile_s": round(time.perf_counter() - begun, 1),
    }


def plan_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a run's config that a plan reads."""
    names = {field.name for field in dataclasses.fields(Plan)}
    return {name: value for name, value in values.items() if name in names}
