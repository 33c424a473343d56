"""What a run needs of each device, asked of the compiler: without weights, and without the device.

The programs of a run (the gradient of a batch of rows, the sampling of a batch of prompts) are
compiled ahead of time for a mesh of described devices. What stays there between them is counted
from shapes and layouts. Every policy is taken to be of one shape, and to be trained whole, without
an adapter; a frozen language model and an index on the same devices come on top.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ragrl.batch import Layout, Rows
from jax_ragrl.models.attention import cudnn_takes
from jax_ragrl.models.config import (
    DecoderConfig,
    abstract_params,
    logical_axes,
    param_count,
    used_as,
)
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.sampling.decode import Grammar, Prompts, begin, generate, go_on
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sharding import Rules, make_mesh, to_sharding, tree_shardings, ways
from jax_ragrl.topology import is_gpu, memory_of
from jax_ragrl.train.job import load_recipe
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


def plan(run: Plan, config: DecoderConfig, devices: Sequence[Any]) -> dict[str, Any]:
    """Bytes of each device: what stays (`state`), and what each program takes beside it.

    `state` holds of each policy float32 weights, both moments of Adam, and, where the objective has
    them, a reference in the dtype of `compute` and a critic with moments of its own. `peak_bytes`
    is the larger of both programs on top of it; `fits` compares it with the device's memory, None
    where that is not known. Policies and critics are updated one after the other, a critic by a
    program like its policy's, so that one gradient is counted.
    """
    mesh = make_mesh(run.mesh or (1, -1, 1), devices)
    computed = {"dtype": run.compute, "remat": run.remat, "attention_impl": run.attention}
    config = dataclasses.replace(config, param_dtype="float32", **computed)  # type: ignore[arg-type]
    update, sampling = _update(run, config, mesh), _sampling(run, config, mesh)
    state = run.learners * _state_bytes(run, _abstract(config, mesh)[1])
    peak = state + max(update["bytes"], sampling["bytes"])
    memory = memory_of(devices[0])
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "parameters": param_count(config),
        "policies": run.learners,
        "state_bytes": state,
        "update": update,
        "sampling": sampling,
        "peak_bytes": peak,
        "memory_bytes": memory,
        "fits": peak < memory if memory else None,
    }


def _abstract(config: DecoderConfig, mesh: Mesh, rules: Rules | None = None) -> tuple[Any, Any]:
    """A split decoder whose parameters are shapes with layouts."""
    shapes = abstract_params(config)
    layouts = tree_shardings(logical_axes(config), shapes, mesh, rules)
    return nnx.split(Decoder.from_params(config, _placed(shapes, layouts)), nnx.Param)


def _state_bytes(run: Plan, params: Any) -> int:
    weights, moment = _bytes(params), jnp.dtype(run.optimizer.moments).itemsize / 4
    learner = weights * (2 + moment)  # weights and second moments are float32
    critics = run.objective.critic == "own"
    reference = _bytes(params, run.compute) if run.objective.kl.where != "none" else 0
    return int(learner * (1 + critics) + reference)


def _bytes(tree: Any, compute: str | None = None) -> int:
    """Bytes that a device holds of arrays; of parameters as a forward in `compute` takes them."""

    def size(path: Any, x: Any) -> int:
        dtype = used_as(path, x, compute) if compute else x.dtype
        return math.prod(x.sharding.shard_shape(x.shape)) * dtype.itemsize

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(size, tree)))


def _update(run: Plan, config: DecoderConfig, mesh: Mesh) -> dict[str, Any]:
    """The gradient of the longest rows, every token of which may be scored."""
    length = max(run.layout.lengths)
    graph, params = _abstract(_attending(config, length, mesh), mesh)
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
            total=params,
        )
    facts, _ = _compiled(traced, mesh)
    # The sum of gradients is there before the first batch, and each is added to it in place.
    total = facts["temporary_bytes"] + _bytes(params)
    return {"rows": [count, length], **facts, "bytes": total}


def _sampling(run: Plan, config: DecoderConfig, mesh: Mesh) -> dict[str, Any]:
    """The batch of prompts whose cache is largest, `run.width` continuations each.

    While a rollout lasts, a copy of each policy's weights is there for it: in the dtype that it
    computes in, and whole on the devices that share a batch. Where a cache grows, the batch is
    taken to need all of it while no row has ended, and of each policy another batch has begun.
    """
    new, shared = run.width * run.shapes.steps, ways(mesh)
    length = max(run.shapes.lengths, key=lambda n: run.shapes.most(n, shared) * (n + new))
    acting = dataclasses.replace(_attending(config, length, mesh), param_dtype=run.compute)
    graph, params = _abstract(acting, mesh, Rules(embed=None))
    weights = run.learners * _bytes(params)
    count = run.shapes.most(length, shared)

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
    given = (graph, params, prompts, Grammar(_whole((2,), jnp.int32, mesh)))
    facts = {"width": run.width, "weight_bytes": weights, **_decoding(run, given, mesh)}
    return {"prompts": [count, length], **facts, "bytes": weights + facts["temporary_bytes"]}


def _decoding(run: Plan, given: tuple[Any, ...], mesh: Mesh) -> dict[str, Any]:
    """What the programs of a batch take at most, with the rows and caches between them."""
    first, *more = run.shapes.caches(run.shapes.steps)
    with jax.set_mesh(mesh):
        if not more:
            return _compiled(generate.lower(*given, width=run.width, steps=first), mesh)[0]
        given = (*given, _whole((ways(mesh),), jnp.int32, mesh))
        traced = begin.lower(*given, width=run.width, slots=first)
        begun, layouts = _compiled(traced, mesh)
        last = begin.eval_shape(*given, width=run.width, slots=more[-1])
        small, large = (_placed(x, layouts) for x in (traced.out_info, last))
        ended, _ = _compiled(go_on.lower(*given, *large), mesh)
    # A cache is copied array by array while it grows.
    beside = max(ended["temporary_bytes"], *(_bytes(x) for x in jax.tree.leaves(large)))
    most = max(begun["temporary_bytes"] + _bytes(small), _bytes(large) + beside)
    return {
        "temporary_bytes": most + run.learners * _bytes(small),
        "compile_s": round(begun["compile_s"] + ended["compile_s"], 1),
    }


def _placed(tree: Any, layouts: Any) -> Any:
    def placed(x: Any, layout: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return jax.tree.map(placed, tree, layouts)


def _batch(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    names = ("batch",) + (None,) * (len(shape) - 1)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=to_sharding(names, shape, mesh))


def _whole(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _attending(config: DecoderConfig, length: int, mesh: Mesh) -> DecoderConfig:
    """A config with the attention that its devices choose for rows of a length."""
    c, (device, *_) = config, mesh.devices.flat
    if c.attention_impl != "auto":
        return c
    q, k = (
        jax.ShapeDtypeStruct((1, length, heads, c.head_dim), jnp.dtype(c.dtype))
        for heads in (c.num_heads, c.num_kv_heads)
    )
    impl = "splash" if device.platform == "tpu" else "xla"
    if is_gpu(device):
        with jax.set_mesh(mesh):
            impl = "cudnn" if cudnn_takes(q, k) else "xla"
    return dataclasses.replace(config, attention_impl=impl)


def _compiled(traced: Any, mesh: Mesh) -> tuple[dict[str, Any], Any]:
    """What the compiler says of a program: bytes beside its arguments, seconds to compile; and the
    layouts of what it returns."""
    # Where there is no GPU, none can be asked which of several kernels is faster, or possible.
    off = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    options: dict[str, Any] = off if is_gpu(mesh.devices.flat[0]) else {}
    begun = time.perf_counter()
    compiled = traced.compile(options)
    facts = {
        "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
        "compile_s": round(time.perf_counter() - begun, 1),
    }
    return facts, compiled.output_shardings


def plan_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan that a run's config has, and those that its system's recipe decides."""
    names = {field.name for field in dataclasses.fields(Plan)}
    given = {name: value for name, value in values.items() if name in names}
    return given | (_of_system(dict(values)) if "system" in values else {})


def _of_system(values: dict[str, Any]) -> dict[str, int]:
    # What a user has yet to name, such as a file, is None; nothing is read here.
    named = {key: "" if x is None else x for key, x in values.get("recipe", {}).items()}
    recipe = load_recipe(values | {"recipe": named})
    policies = {role.policy for role in recipe.system.roles.values()}
    return {"width": recipe.width, "learners": len(policies)}
