"""Copies of arrays in host memory, from which their devices get them back bit by bit.

A copy on the devices would need as much of their memory again. The transfer runs in the background,
from memory that is pinned for it; devices without such memory copy the arrays in their own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

PINNED = "pinned_host"


def copy_to_host(tree: Any) -> Any:
    """Returns copies of arrays, which a later donation of the arrays does not touch."""

    def copied(x: jax.Array) -> jax.Array:
        device: Any = next(iter(x.sharding.addressable_devices))
        if PINNED not in (memory.kind for memory in device.addressable_memories()):
            return jnp.copy(x)
        # Each process copies its own parts of an array that several processes share.
        return jax.device_put(x, x.sharding.with_memory_kind(PINNED))

    return jax.tree.map(copied, tree)


def copy_to_devices(copies: Any, arrays: Any) -> Any:
    """Returns copies of `copy_to_host`, placed like the arrays of the devices; deletes these."""
    return jax.tree.map(_replace, copies, arrays)


def _replace(copied: jax.Array, array: jax.Array) -> jax.Array:
    sharding, is_committed = array.sharding, array.committed
    array.delete()
    # An array that is bound to a device would compile every program that takes it again.
    return (
        jax.device_put(copied, sharding) if is_committed else jax.device_put(jax.device_get(copied))
    )
