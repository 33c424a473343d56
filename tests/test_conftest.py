"""The rules that `conftest.py` promises are in force: each would pass silently without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec


def test_dtypes_and_ranks_do_not_promote_silently_on_eight_devices():
    with pytest.raises(ValueError, match="strict"):
        jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.int32)
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones(3) + jnp.ones((2, 3))
    assert jax.device_count() == 8


def test_arrays_do_not_move_between_devices_silently():
    mesh = jax.make_mesh((8,), ("data",))
    spread = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, PartitionSpec("data")))
    elsewhere = jax.device_put(np.ones(8, np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="device-to-device"):
        jax.jit(jnp.add)(spread, elsewhere)


def test_no_transfers_refuses_host_arrays_only(no_transfers):
    double = jax.jit(lambda x: x * 2)
    on_host = np.ones(3, np.float32)
    on_device = jax.device_put(on_host)
    with no_transfers():
        double(on_device)
        with pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device"):
            double(on_host)
