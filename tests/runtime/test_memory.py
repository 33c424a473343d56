"""Free memory goes back to the system."""

import ctypes
import pathlib
import resource
import sys

import pytest

from jax_ragrl.runtime.memory import return_free_memory


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
