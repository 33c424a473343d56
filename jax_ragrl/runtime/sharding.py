"""The device mesh, and one table that maps each named dimension to mesh axes.

A weight names its dimensions (`("layers", "embed", "mlp")`), `Rules` maps these names to mesh axes,
and `to_spec` builds the `PartitionSpec` or refuses it. No other module of the library writes a
`PartitionSpec` by hand. A mesh of None stands for the first device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jax_ragrl.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")
# A device with fewer columns of a matrix has products too narrow for its matrix units.
COLUMNS = 128

MeshAxes = None | str | tuple[str, ...]
LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Maps each logical axis to mesh axes; `None` replicates.

    `uneven` names the logical axes that are replicated if the mesh axes do not divide their size:
    with 8-way tensor parallelism and 2 key-value heads, each device holds both heads. For any other
    axis this is an error.
    """

    batch: MeshAxes = ("data", "fsdp")
    length: MeshAxes = None
    layers: MeshAxes = None
    embed: MeshAxes = "fsdp"
    mlp: MeshAxes = "tensor"
    heads: MeshAxes = "tensor"
    kv: MeshAxes = "tensor"
    vocab: MeshAxes = "tensor"
    uneven: tuple[str, ...] = ("kv",)

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """Returns the mesh axes of one logical axis; `()` replicates it."""
        if logical is None:
            return ()
        names = [f.name for f in dataclasses.fields(self) if f.name != "uneven"]
        if logical not in names:
            raise UserError(f"no rule for logical axis {logical!r}: use one of {', '.join(names)}")
        axes = getattr(self, logical)
        return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def make_mesh(
    shape: Sequence[int], devices: Sequence[jax.Device] | None = None, width: int = 0
) -> Mesh:
    """Returns a mesh with the axes `(data, fsdp, tensor)` over some devices, by default all.

    One entry of `shape` may be -1, which stands for the remaining devices. If data and fsdp both
    are, fsdp is `widest_fsdp` of the remaining devices for a model of this hidden width.
    `UserError` unless the product of three positive entries is the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = tuple(shape)
    if sizes[:2] == (-1, -1):
        fsdp = widest_fsdp(len(devices) // max(math.prod(sizes[2:]), 1), width)
        sizes = (-1, fsdp, *sizes[2:])
    if sizes.count(-1) == 1:
        others = math.prod(n for n in sizes if n != -1)
        sizes = tuple(len(devices) // max(others, 1) if n == -1 else n for n in sizes)
    if len(sizes) != len(MESH_AXES) or min(sizes) < 1 or math.prod(sizes) != len(devices):
        multiple = "a multiple of " if -1 in shape else ""
        needed = math.prod(n for n in shape if n != -1)
        raise UserError(
            f"mesh {tuple(shape)} over (data, fsdp, tensor) needs {multiple}{needed} devices but "
            f"there are {len(devices)}: choose three factors of {len(devices)}, of which one, or "
            "the first two, may be -1"
        )
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(device_array(sizes, devices), MESH_AXES, axis_types=auto)


def device_array(sizes: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """Arranges devices so that neighbors along an axis have fast connections."""
    if sizes[-1] > 1 and len({d.process_index for d in devices}) > 1:
        # Each host samples with its own devices, so that they must hold whole rows of `tensor`.
        by_host = sorted(devices, key=lambda d: (_slice_of(d), d.process_index, d.id))
        return np.array(by_host).reshape(sizes)
    slices = len({_slice_of(d) for d in devices})
    if slices > 1:
        # The network between slices is slow, and the axis `data` communicates least.
        data = math.gcd(sizes[0], slices)
        across = (data, slices // data, 1)
        within = [size // n for size, n in zip(sizes, across, strict=True)]
        return mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    # An axis of the mesh may be a part of a physical one: 2 x 32 on a torus of 8 x 8, for example.
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _slice_of(device: jax.Device) -> int:
    """The slice of a TPU device; 0 for GPUs, whose order already respects their slices."""
    return getattr(device, "slice_index", None) or 0 if device.platform == "tpu" else 0


def widest_fsdp(devices: int, width: int) -> int:
    """Returns the size of the largest fsdp axis that suits a model of a hidden width.

    It divides the devices, which data and fsdp share, and the width, and leaves each device at
    least `COLUMNS` columns of the width. Beyond it products are too narrow for a matrix unit, and
    XLA sums gradients of whole layers on every device.
    """
    limit = max(1, width // COLUMNS)
    return max(n for n in range(1, limit + 1) if devices % n == 0 and width % n == 0)


def axis_size(axis: str) -> int:
    """Returns the devices along an axis of the mesh in context; 1 without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def batch_axes() -> tuple[str, ...]:
    """Returns the axes of the mesh in context that split a batch; none without a mesh."""
    return tuple(axis for axis in ("data", "fsdp") if axis_size(axis) > 1)


def to_spec(
    logical_axes: LogicalAxes,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array whose dimensions have names; None replicates one.

    `UserError` if two dimensions map to the same mesh axis, a rule names an axis that the mesh
    lacks, or the mesh axes do not divide a dimension (see `Rules.uneven`).
    """
    rules = Rules() if rules is None else rules
    if len(logical_axes) != len(shape):
        raise UserError(f"axes {logical_axes} name {len(logical_axes)} dimensions of {len(shape)}")
    entries, owner = list[tuple[str, ...]](), dict[str, str | None]()
    for name, size in zip(logical_axes, shape, strict=True):
        entries.append(_place(name, size, mesh, rules))
        for axis in entries[-1]:
            if axis in owner:
                raise UserError(
                    f"axes {logical_axes}: {owner[axis]} and {name} both map to mesh axis "
                    f"{axis!r}: change one rule"
                )
            owner[axis] = name
    return _spec(entries)


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*[None if not e else e[0] if len(e) == 1 else e for e in entries])


def _place(
    logical: str | None, size: int, mesh: Mesh | AbstractMesh, rules: Rules
) -> tuple[str, ...]:
    axes = rules.mesh_axes(logical)
    missing = [a for a in axes if a not in mesh.shape]
    if missing:
        raise UserError(
            f"rule {logical} -> {axes} names mesh axis {missing[0]!r}, which mesh "
            f"{tuple(mesh.axis_names)} lacks: correct the rule"
        )
    parts = math.prod(mesh.shape[a] for a in axes)
    if size % parts == 0:
        return axes
    if logical in rules.uneven:
        return ()
    raise UserError(
        f"{logical} = {size} does not divide over mesh axes {axes} of {parts} devices: "
        f"choose a mesh whose {'*'.join(axes)} divides {size}"
    )


def to_sharding(
    logical_axes: LogicalAxes, shape: Sequence[int], mesh: Mesh, rules: Rules | None = None
) -> NamedSharding:
    """Returns the sharding of an array; the arguments are as in `to_spec`."""
    return NamedSharding(mesh, to_spec(logical_axes, shape, mesh, rules))


def tree_shardings(axes: Any, shapes: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """Returns the sharding of every array of a tree, given a tree of tuples of logical axes."""
    return jax.tree.map(
        lambda names, x: to_sharding(names, x.shape, mesh, rules),
        axes,
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def without_batch_sharding(layout: Sharding) -> Sharding:
    """Removes the axes data and fsdp from a sharding; without a mesh it is returned unchanged."""
    if not isinstance(layout, NamedSharding):
        return layout
    entries = [(e,) if isinstance(e, str) else e or () for e in layout.spec]
    tensor = [tuple(axis for axis in entry if axis not in ("data", "fsdp")) for entry in entries]
    return NamedSharding(layout.mesh, _spec(tensor))


def constrain(x: jax.Array, logical_axes: LogicalAxes) -> jax.Array:
    """Constrains the sharding of an activation under `jax.set_mesh`; without a mesh, returns `x`.

    Unlike the sharding of a weight this is a hint: the compiler chooses for a dimension that the
    mesh axes do not divide (such as a batch of one), instead of an error.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(MESH_AXES) <= set(mesh.axis_names) or mesh.size == 1:
        return x
    rules = _hint_rules(logical_axes)
    return jax.lax.with_sharding_constraint(x, to_spec(logical_axes, x.shape, mesh, rules))


def hinted_sharding(logical_axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Returns the sharding that `constrain` gives to an array under the mesh."""
    return to_sharding(logical_axes, shape, mesh, _hint_rules(logical_axes))


def _hint_rules(logical_axes: LogicalAxes) -> Rules:
    return Rules(uneven=tuple(a for a in logical_axes if a))


def on_each_device(
    f: Callable[..., jax.Array], arrays: Sequence[jax.Array], names: Sequence[LogicalAxes]
) -> jax.Array:
    """Returns `f(*arrays)`, which under `jax.set_mesh` each device computes for its own parts.

    For kernels, which the compiler cannot divide. `names` are the logical axes of each argument;
    the result is divided as the first one is. A batch that does not divide over the mesh is
    replicated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return f(*arrays)
    rules = Rules(uneven=("batch",))
    specs = [to_spec(name, x.shape, mesh, rules) for name, x in zip(names, arrays, strict=True)]
    divided = jax.shard_map(f, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)
    result: jax.Array = divided(*arrays)
    return result


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Places every array of a tree, or random key, whole on every device of a mesh."""
    if mesh is None:
        return jax.device_put(tree)
    sharding = NamedSharding(mesh, PartitionSpec())
    if mesh.is_multi_process:
        return _put_on_all_hosts(tree, lambda _: sharding)
    return jax.device_put(tree, sharding)


def shard_batch(tree: Any, mesh: Mesh | None) -> Any:
    """Divides NumPy arrays `[batch, ...]` over the data-parallel devices of a mesh."""
    if mesh is None:
        return jax.device_put(tree)

    def sharding(x: np.ndarray) -> NamedSharding:
        names = ("batch",) + (None,) * (x.ndim - 1)
        return to_sharding(names, x.shape, mesh)

    if mesh.is_multi_process:
        return _put_on_all_hosts(tree, sharding)
    return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), tree)


# --- Several hosts --------------------------------------------------------------------------------


def _put_on_all_hosts(tree: Any, sharding: Callable[[Any], NamedSharding]) -> Any:
    """Places arrays that are equal on all processes; each puts its part on its own devices.

    They compare a checksum. (`jax.device_put` would copy the arrays of all hosts to every device to
    compare them.)
    """
    checksums: list[int] = []

    def put(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding(x))
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                put(jax.random.key_data(x)), impl=jax.random.key_impl(x)
            )
        host = np.asarray(jax.device_get(x))
        checksums.append(zlib.crc32(host.tobytes()))
        return jax.make_array_from_callback(host.shape, sharding(host), lambda index: host[index])

    arrays = jax.tree.map(put, tree)
    total = np.uint32(zlib.crc32(repr(checksums).encode()))
    multihost_utils.assert_equal(total, "the processes of this run have different numbers")
    return arrays


def local_mesh(mesh: Mesh | None) -> Mesh | None:
    """Returns the part of a mesh on this process's devices, `(1, rows, tensor)`.

    `UserError`, on all processes, if the axis tensor spans several processes.
    """
    if mesh is None or not mesh.is_multi_process:
        return mesh
    return part_of_process(mesh, jax.process_index())


def part_of_process(mesh: Mesh, process: int) -> Mesh:
    """Returns the part of a mesh, real or described, on the devices of a process; see above."""
    rows = mesh.devices.reshape(-1, mesh.shape["tensor"])
    if any(len({d.process_index for d in row}) > 1 for row in rows):
        count = sum(device.process_index == process for device in mesh.devices.flat)
        raise UserError(
            f"mesh {tuple(mesh.shape.values())} splits weights over {mesh.shape['tensor']} devices "
            f"of several hosts, but each samples with its own {count}: choose a tensor axis (the "
            "last) that divides these"
        )
    own = [row for row in rows if row[0].process_index == process]
    return Mesh(np.array(own)[None], mesh.axis_names, axis_types=mesh.axis_types)


def local_part(x: jax.Array) -> jax.Array:
    """Returns an array that only tensor divides on this process's devices, without a copy."""
    mesh = local_mesh(mesh_of(x))
    if mesh is None or x.is_fully_addressable:
        return x
    sharding = without_batch_sharding(x.sharding)
    assert isinstance(sharding, NamedSharding), "an array with a mesh has a named sharding"
    local = NamedSharding(mesh, sharding.spec)
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, local, shards)


# --- With or without a mesh -----------------------------------------------------------------------


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh of the arrays of a tree; None if they are on one device."""
    mesh = getattr(getattr(jax.tree.leaves(tree)[0], "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def mesh_context(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Returns the context in which a computation uses the mesh."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def accelerators() -> list[jax.Device]:
    """Returns the devices of this process; none of a CPU, whose devices share its cores."""
    return [] if jax.default_backend() == "cpu" else jax.local_devices()


def target_platform() -> str:
    """Returns `cpu`, `gpu` or `tpu`: the devices of the mesh that is set, or the default ones.

    A program may be compiled for devices that are not present (`runtime.topology`).
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform == "cuda" else platform


def data_parallel_size(mesh: Mesh | None) -> int:
    """Returns the number of devices that a batch is divided over."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def replicate_like(x: Any, placed: jax.Array) -> jax.Array:
    """Places a small host array whole on every device that holds the array `placed`."""
    mesh = mesh_of(placed)
    return jax.device_put(x, placed.sharding) if mesh is None else replicate(x, mesh)


def sharding_of_results(arguments: Any) -> Sharding | None:
    """Returns the sharding that a program on one device gives to its results.

    None if no argument is committed to the device: the results are not committed either, and to a
    later program they have no sharding.
    """
    return next((x.sharding for x in jax.tree.leaves(arguments) if x.committed), None)


def commit_like(tree: Any, arguments: Any) -> Any:
    """Commits arrays to their devices, without a copy, if an array of `arguments` is committed.

    A program that takes both commits its results. Results that are arguments of the next call would
    be uncommitted in the first call alone, and another program would be compiled for it.
    """
    if sharding_of_results(arguments) is None:
        return tree
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


def to_host(tree: Any) -> Any:
    """Copies arrays to the host; if several hosts hold parts of them, all hosts get the whole."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
