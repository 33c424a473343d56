"""Work that takes an accelerator so little time that a smaller program for it does not pay.

Each static shape is a program, and an H100 compiles one of a model with 30 layers for 10 to 28
seconds. On a CPU a smaller shape always saves time.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jax_ragrl.runtime.sharding import mesh_context, target_platform

# Floating-point operations of a call, per device: about 20 ms at half of an H100's speed.
FREE_FLOPS = {"cpu": 0.0}
FREE_FLOPS_ACCELERATOR = 8e12


def free_tokens(parameters: int, mesh: Mesh | None = None, *, is_trained: bool = False) -> int:
    """Returns the number of tokens per device that a model computes in negligible time; 0 on a CPU.

    Without a mesh, the one that is set counts, or the default device. A gradient (`is_trained`)
    takes three times as long as a forward pass.
    """
    with mesh_context(mesh):
        flops = FREE_FLOPS.get(target_platform(), FREE_FLOPS_ACCELERATOR)
    return int(flops / (2 * max(1, parameters) * (3 if is_trained else 1)))


def count_elements(tree: Any) -> int:
    """Returns the number of elements of all arrays of a tree, such as the parameters of a model."""
    return sum(x.size for x in jax.tree.leaves(tree))
