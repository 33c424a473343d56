"""The device mesh, and one table that says which mesh axis each named dimension lies on.

A weight names its dimensions (`("layers", "embed", "mlp")`); `Rules` maps those names to mesh axes;
`to_spec` makes the `PartitionSpec` and refuses what cannot work. Nothing else in the library writes
a `PartitionSpec` by hand.
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

MeshAxes = None | str | tuple[str, ...]
LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis to mesh axes; `None` replicates.

    `uneven` names the logical axes that are replicated where their size does not divide the mesh
    axes: with 8-way tensor parallelism and 2 key-value heads every device keeps both. Any other
    axis that does not divide is an error.
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
        """The mesh axes of one logical axis; `()` replicates. Unknown names are a `UserError`."""
        if logical is None:
            return ()
        names = [f.name for f in dataclasses.fields(self) if f.name != "uneven"]
        if logical not in names:
            raise UserError(f"no rule for logical axis {logical!r}: use one of {', '.join(names)}")
        axes = getattr(self, logical)
        return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def make_mesh(shape: Sequence[int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `(data, fsdp, tensor)`; `devices` defaults to all of them.

    One entry of `shape` may be -1 and takes the devices that are left. Raises `UserError` when the
    shape does not have three positive entries whose product is the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = _fill_in(tuple(shape), len(devices))
    if len(sizes) != len(MESH_AXES) or min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh {tuple(shape)} over (data, fsdp, tensor) needs {math.prod(sizes)} devices but "
            f"there are {len(devices)}: choose three factors of {len(devices)}"
        )
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(arranged(sizes, devices), MESH_AXES, axis_types=auto)


def arranged(sizes: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """The devices as an array of the mesh, so that those of an axis have short ways."""
    if sizes[-1] > 1 and len({d.process_index for d in devices}) > 1:
        # Each host samples with its own devices, so they have to hold whole rows of a tensor axis.
        by_host = sorted(devices, key=lambda d: (_slice_of(d), d.process_index, d.id))
        return np.array(by_host).reshape(sizes)
    slices = len({_slice_of(d) for d in devices})
    if slices > 1:
        # The network between slices is slower, and the devices of `data` talk least.
        data = math.gcd(sizes[0], slices)
        across = (data, slices // data, 1)
        within = [size // n for size, n in zip(sizes, across, strict=True)]
        return mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    # An axis may take a part of one of a torus: two of 32 devices each on one of 8 x 8, say.
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _slice_of(device: jax.Device) -> int:
    """The slice that a TPU's device belongs to. A GPU has one too, but its order respects that."""
    return getattr(device, "slice_index", None) or 0 if device.platform == "tpu" else 0


def _fill_in(shape: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    if shape.count(-1) != 1:
        return shape
    known = math.prod(n for n in shape if n != -1)
    return tuple(num_devices // max(known, 1) if n == -1 else n for n in shape)


def axis_size(axis: str) -> int:
    """The devices along an axis of the mesh under `jax.set_mesh`; 1 where there is none."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def to_spec(
    logical_axes: LogicalAxes,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
) -> PartitionSpec:
    """The `PartitionSpec` of an array of `shape` whose dimensions are named `logical_axes`.

    Raises `UserError` when two dimensions want the same mesh axis, when a rule names an axis that
    the mesh lacks, or when a dimension does not divide (see `Rules.uneven`).
    """
    rules = Rules() if rules is None else rules
    if len(logical_axes) != len(shape):
        raise UserError(f"axes {logical_axes} name {len(logical_axes)} dimensions of {len(shape)}")
    entries = [
        _place(name, size, mesh, rules) for name, size in zip(logical_axes, shape, strict=True)
    ]
    _check_used_once(logical_axes, entries)
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
    ways = math.prod(mesh.shape[a] for a in axes)
    if size % ways == 0:
        return axes
    if logical in rules.uneven:
        return ()
    raise UserError(
        f"{logical} = {size} does not divide over mesh axes {axes} of {ways} devices: "
        f"choose a mesh whose {'*'.join(axes)} divides {size}"
    )


def _check_used_once(logical_axes: LogicalAxes, entries: list[tuple[str, ...]]) -> None:
    taken: dict[str, str | None] = {}
    for name, axes in zip(logical_axes, entries, strict=True):
        for axis in axes:
            if axis in taken:
                raise UserError(
                    f"axes {logical_axes}: {taken[axis]} and {name} both map to mesh axis "
                    f"{axis!r}: change one rule"
                )
            taken[axis] = name


def to_sharding(
    logical_axes: LogicalAxes, shape: Sequence[int], mesh: Mesh, rules: Rules | None = None
) -> NamedSharding:
    """`to_spec` on its mesh."""
    return NamedSharding(mesh, to_spec(logical_axes, shape, mesh, rules))


def tree_shardings(axes: Any, shapes: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """A tree of `NamedSharding` from a tree of logical axes and one of arrays or shape structs."""
    return jax.tree.map(
        lambda names, x: to_sharding(names, x.shape, mesh, rules),
        axes,
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def whole_along_batch(layout: Sharding) -> Sharding:
    """A layout without the split over data and fsdp; without a mesh, itself."""
    if not isinstance(layout, NamedSharding):
        return layout
    entries = [(e,) if isinstance(e, str) else e or () for e in layout.spec]
    kept = [tuple(axis for axis in entry if axis not in ("data", "fsdp")) for entry in entries]
    return NamedSharding(layout.mesh, _spec(kept))


def constrain(x: jax.Array, logical_axes: LogicalAxes) -> jax.Array:
    """Pin an activation's layout under `jax.set_mesh`; without a mesh in context, `x` itself.

    A hint, unlike a weight's layout: a dimension that does not divide (a batch of one) is left to
    the compiler rather than refused.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(MESH_AXES) <= set(mesh.axis_names) or mesh.size == 1:
        return x
    rules = Rules(uneven=tuple(a for a in logical_axes if a))
    return jax.lax.with_sharding_constraint(x, to_spec(logical_axes, x.shape, mesh, rules))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Every leaf, a key or a small array, whole on every device of the mesh."""
    whole = NamedSharding(mesh, PartitionSpec())
    if mesh.is_multi_process:
        return _from_all(tree, lambda _: whole)
    return jax.device_put(tree, whole)


def shard_batch(tree: Any, mesh: Mesh) -> Any:
    """Host arrays whose first dimension is the batch, placed over the mesh.

    Leaves are NumPy arrays `[batch, ...]`; the batch must divide the data-parallel devices.
    """

    def layout(x: np.ndarray) -> NamedSharding:
        names = ("batch",) + (None,) * (x.ndim - 1)
        return to_sharding(names, x.shape, mesh)

    if mesh.is_multi_process:
        return _from_all(tree, layout)
    return jax.tree.map(lambda x: jax.device_put(x, layout(x)), tree)


# --- Several hosts --------------------------------------------------------------------------------


def _from_all(tree: Any, layout: Callable[[Any], NamedSharding]) -> Any:
    """What all processes have alike, of which each puts its part on its own devices.

    They compare a checksum: hosts that came to different numbers must not train on without a word.
    (`jax.device_put` compares whole arrays, those of all hosts on every device.)
    """
    seen: list[int] = []

    def put(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, layout(x))
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                put(jax.random.key_data(x)), impl=jax.random.key_impl(x)
            )
        host = np.asarray(jax.device_get(x))
        seen.append(zlib.crc32(host.tobytes()))
        return jax.make_array_from_callback(host.shape, layout(host), lambda index: host[index])

    placed = jax.tree.map(put, tree)
    total = np.uint32(zlib.crc32(repr(seen).encode()))
    multihost_utils.assert_equal(total, "the processes of this run came to different numbers")
    return placed


def own_mesh(mesh: Mesh | None) -> Mesh | None:
    """This process's part of a mesh, `(1, rows, tensor)`; of one process's mesh, itself.

    Raises `UserError` where a tensor axis crosses processes, alike on all of them.
    """
    if mesh is None or not mesh.is_multi_process:
        return mesh
    rows = mesh.devices.reshape(-1, mesh.shape["tensor"])
    if any(len({d.process_index for d in row}) > 1 for row in rows):
        raise UserError(
            f"mesh {tuple(mesh.shape.values())} splits weights over {mesh.shape['tensor']} devices "
            f"of several hosts, but each samples with its own {len(mesh.local_devices)}: choose a "
            "tensor axis (the last) that divides these"
        )
    own = [row for row in rows if row[0].process_index == jax.process_index()]
    return Mesh(np.array(own)[None], mesh.axis_names, axis_types=mesh.axis_types)


def own_part(x: jax.Array) -> jax.Array:
    """An array that is whole along data and fsdp, on this process's devices; without a copy."""
    mesh = own_mesh(mesh_of(x))
    if mesh is None or x.is_fully_addressable:
        return x
    whole = whole_along_batch(x.sharding)
    assert isinstance(whole, NamedSharding), "a mesh has been found"
    layout = NamedSharding(mesh, whole.spec)
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, layout, shards)


# --- With a mesh or without: None is the first device --------------------------------------------


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of a tree lie on; None where they lie on one device."""
    mesh = getattr(getattr(jax.tree.leaves(tree)[0], "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The context to compute in."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def ways(mesh: Mesh | None) -> int:
    """Among how many devices a batch is split."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def place(tree: Any, mesh: Mesh | None) -> Any:
    """Host arrays `[batch, ...]` on the devices, the batch spread over the mesh."""
    return jax.device_put(tree) if mesh is None else shard_batch(tree, mesh)


def share(tree: Any, mesh: Mesh | None) -> Any:
    """Host arrays whole on every device."""
    return jax.device_put(tree) if mesh is None else replicate(tree, mesh)


def beside(x: Any, placed: jax.Array) -> jax.Array:
    """A small host array whole on every device that holds the array `placed`."""
    mesh = mesh_of(placed)
    return jax.device_put(x, placed.sharding) if mesh is None else replicate(x, mesh)


def fetch(tree: Any) -> Any:
    """Arrays on the host, whole, wherever they are."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
