"""The sharding rules; sharded and unsharded models compute the same."""

import dataclasses
import itertools
import math

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig, abstract_params, logical_axes
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.runtime import sharding
from jax_ragrl.runtime.sharding import (
    Rules,
    constrain,
    make_mesh,
    shard_batch,
    to_spec,
    tree_shardings,
    widest_fsdp,
)

TINY = DecoderConfig(64, 32, 48, 2, 4, 2, 8, qkv_bias=True, tie_embeddings=False)


def mesh_of(*shape: int):
    return make_mesh(shape, jax.devices()[: int(np.prod(shape))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((1, 8, 1), {}),
        ((1, 4, 2), {}),
        ((2, 2, 2), {}),
        ((1, 1, 2), {}),
        ((1, 2, 4), {}),  # two key-value heads do not divide over four devices
        ((2, 2, 2), {"num_kv_heads": 1}),
    ],
)
def test_a_sharded_forward_equals_the_unsharded_one(shape, changes):
    config, mesh = dataclasses.replace(TINY, **changes), mesh_of(*shape)
    unsharded = decoding.random_decoder(config)
    layout = tree_shardings(logical_axes(config), abstract_params(config), mesh)
    sharded = Decoder.from_params(
        config, jax.device_put(jax.device_get(unsharded.params()), layout)
    )
    ids_BL = np.random.default_rng(0).integers(0, 64, (8, 9), np.int32)
    expected = decoding.logits(unsharded, ids_BL)
    with jax.set_mesh(mesh):
        actual = decoding.logits(sharded, shard_batch(ids_BL, mesh))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_sharded_initialization_makes_no_full_copy():
    mesh = mesh_of(1, 4, 2)
    unsharded = Decoder(TINY, rngs=nnx.Rngs(3)).params()
    sharded = init_sharded(TINY, mesh, nnx.Rngs(3)).params()
    for a, b in zip(jax.tree.leaves(unsharded), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(a, jax.device_get(b), rtol=1e-6)
    gate = sharded["layers"]["gate_proj"]
    assert gate.addressable_shards[0].data.shape == (2, 32 // 4, 48 // 2)


def test_only_key_value_heads_may_be_uneven():
    mesh = mesh_of(1, 1, 8)
    spec = to_spec(("layers", "embed", "kv", None), (2, 32, 2, 8), mesh)
    assert spec == PartitionSpec(None, "fsdp", None, None)
    with pytest.raises(UserError, match=r"heads = 14 does not divide .* 8 devices"):
        to_spec(("heads", None), (14, 64), mesh)
    relaxed = Rules(uneven=("kv", "heads"))
    assert to_spec(("heads", None), (14, 64), mesh, relaxed) == PartitionSpec(None, None)


@pytest.mark.parametrize(
    ("axes", "rules", "words"),
    [
        (("width",), Rules(), "no rule for logical axis 'width'"),
        (("embed",), Rules(embed="model"), "names mesh axis 'model'"),
        (("embed", "mlp", "kv"), Rules(), "name 3 dimensions of"),
        (("heads", "mlp"), Rules(), "heads and mlp both map to mesh axis 'tensor'"),
        (("batch", "embed"), Rules(), "both map to mesh axis 'fsdp'"),
    ],
)
def test_impossible_rules_are_refused(axes, rules, words):
    with pytest.raises(UserError, match=words):
        to_spec(axes, (32, 48)[: len(axes)], mesh_of(1, 4, 2), rules)


def test_a_mesh_uses_all_devices_and_data_takes_what_a_width_leaves():
    for shape, needed in (((1, 3, 2), "6"), ((1, 16, -1), "a multiple of 16"), ((2, -1), "a.* 2")):
        with pytest.raises(UserError, match=f"needs {needed} devices but there are 8: choose"):
            make_mesh(shape)
    assert dict(make_mesh((1, -1, 2)).shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert make_mesh((-1, -1, 2), width=256).devices.shape == (2, 2, 2)
    assert make_mesh((-1, -1, 1), width=64).devices.shape == (8, 1, 1)


@pytest.mark.parametrize(
    ("devices", "width", "fsdp"),
    [(256, 896, 4), (256, 1536, 8), (1024, 3584, 16), (8, 3584, 8), (8, 64, 1), (6, 3584, 2)],
)
def test_fsdp_leaves_each_device_enough_columns(devices, width, fsdp):
    assert widest_fsdp(devices, width) == fsdp


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that determine its place in a mesh."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0


def torus(*sides: int, slices: int = 1) -> list:
    """Returns the chips of TPU slices, four chips per process."""
    places = list(np.ndindex(*sides))
    chips = itertools.product(range(slices), enumerate(places))
    return [Chip(s * len(places) + i, at, s, (s * len(places) + i) // 4) for s, (i, at) in chips]


@pytest.mark.parametrize("shape", [(2, 32, 1), (4, 16, 1), (1, 64, 1), (64, 1, 1)])
def test_a_mesh_axis_may_be_part_of_a_torus_axis(shape):
    """By default JAX refuses 2 x 32 on 8 x 8 chips."""
    chips = torus(8, 8, 1)
    devices = sharding.device_array(shape, chips)
    assert devices.shape == shape and set(devices.flat) == set(chips)


@pytest.mark.parametrize(
    ("shape", "slices"), [((2, 16, 1), 2), ((4, 8, 1), 2), ((2, 32, 1), 4), ((1, 32, 1), 2)]
)
def test_the_data_axis_crosses_slices_first(shape, slices):
    devices = sharding.device_array(shape, torus(4, 4, 1, slices=slices))
    slice_of = np.vectorize(lambda chip: chip.slice_index)(devices)
    data = math.gcd(shape[0], slices)
    parts = slice_of.reshape(data, shape[0] // data, slices // data, -1).swapaxes(1, 2)
    assert all(len(np.unique(part)) == 1 for part in parts.reshape(slices, -1))
    assert len(np.unique(slice_of)) == slices


def test_constrain_changes_no_value_and_skips_odd_sizes():
    mesh, x = mesh_of(2, 2, 2), np.arange(12.0, dtype=np.float32).reshape(3, 4)
    constrained = jax.jit(lambda x: constrain(x, ("batch", "mlp")))
    np.testing.assert_array_equal(constrained(x), x)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.device_get(constrained(x)), x)
        even = constrained(jnp.zeros((8, 4)))
    assert even.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")
