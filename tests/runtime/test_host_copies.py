"""Copies in host memory: a donated array comes back bit by bit, to where it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_ragrl.runtime import host_copies
from jax_ragrl.runtime.host_copies import copy_to_devices, copy_to_host
from jax_ragrl.runtime.sharding import make_mesh

VALUES = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def placed(where: str) -> jax.Array:
    """Returns a new array: on no certain device, on one device, or on a mesh."""
    if where == "anywhere":
        return jax.jit(lambda: jnp.sin(VALUES))()
    mesh = make_mesh((2, 2, 2))
    sharding = {
        "device": jax.devices()[1],
        "mesh": NamedSharding(mesh, PartitionSpec("fsdp", "tensor")),
    }[where]
    return jnp.copy(jax.device_put(np.sin(VALUES), sharding))


@pytest.mark.parametrize("has_pinned_memory", [True, False])
@pytest.mark.parametrize("where", ["anywhere", "device", "mesh"])
def test_a_donated_array_comes_back(where: str, has_pinned_memory: bool, monkeypatch):
    if not has_pinned_memory:
        monkeypatch.setattr(host_copies, "PINNED", "no such memory")
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    first = placed(where)
    expected, committed, sharding = np.array(first), first.committed, first.sharding
    (copy,) = copy_to_host([first])
    assert (copy.sharding.memory_kind == "pinned_host") == has_pinned_memory
    second = double(first)
    assert first.is_deleted()
    (again,) = copy_to_devices([copy], [second])
    assert second.is_deleted(), "the devices would hold both"
    np.testing.assert_array_equal(np.array(again), expected)
    assert (again.committed, again.sharding) == (committed, sharding)
    # The next update donates it as well.
    np.testing.assert_array_equal(np.array(double(again)), 2 * expected)
