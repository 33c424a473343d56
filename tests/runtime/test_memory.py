"""Memory goes back to the system: free blocks, programs, and copies of arrays on the host."""

import ctypes
import pathlib
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_ragrl.runtime import compile_cache, host_copies
from jax_ragrl.runtime.host_copies import copy_to_devices, copy_to_host
from jax_ragrl.runtime.mappings import free_programs_at_limit
from jax_ragrl.runtime.memory import return_free_memory
from jax_ragrl.runtime.sharding import make_mesh


def resident() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_free_blocks_between_used_ones_are_returned():
    """The C library returns the free end of its heap, but no block before a used one."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    size, count = 16_384, 8_000
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(block)
    before = resident()
    return_free_memory()
    after = resident()
    libc.free(blocks[-1])
    assert before - after > 0.5 * size * count


def files(folder: pathlib.Path, count: int, limit: str = "100\n") -> tuple[pathlib.Path, ...]:
    (folder / "maps").write_text("one line per mapping\n" * count)
    (folder / "limit").write_text(limit)
    return folder / "maps", folder / "limit"


def test_programs_are_dropped_near_the_limit_and_compiled_again(tmp_path, capsys):
    double = jax.jit(lambda x: 2 * x)
    x = jnp.ones(3)
    double(x)
    assert not free_programs_at_limit(*files(tmp_path, 74)) and double._cache_size() == 1
    assert free_programs_at_limit(*files(tmp_path, 75)) and double._cache_size() == 0
    assert "75 of 100 memory mappings" in capsys.readouterr().err
    assert float(double(x)[0]) == 2.0 and double._cache_size() == 1


@pytest.mark.parametrize("limit", ["", "none"])
def test_systems_without_a_limit_keep_their_programs(tmp_path, limit):
    maps, unreadable = files(tmp_path, 75, limit)
    assert not free_programs_at_limit(maps, unreadable)
    assert not free_programs_at_limit(tmp_path / "missing", unreadable)


def test_the_mappings_are_counted_after_each_compilation(monkeypatch):
    counts = []
    monkeypatch.setattr(compile_cache, "free_programs_at_limit", lambda: counts.append(1))
    triple, x = jax.jit(lambda x: 3 * x), jnp.ones(4)
    for _ in range(2):
        with compile_cache.report_compiling("triple"):
            triple(x)
    assert len(counts) == 1


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
