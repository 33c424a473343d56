"""Chooses a mesh, `remat` and a batch size that fit the memory of the devices.

If nothing fits next to an exact index, the index is left to a server per host.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.plan.abstract_arrays import TooLargeError
from jax_ragrl.plan.other_models import REMOTE, SERVER
from jax_ragrl.run.config import Job
from jax_ragrl.runtime.sharding import widest_fsdp

Plan = Callable[..., dict[str, Any]]
# The least recomputation first.
REMATS = ("none", "dots", "full")
HALVINGS = 2  # of the tokens per device
SAMPLING = "sampling"  # the program of a `TooLargeError`


def meshes(policies: Sequence[DecoderConfig], devices: int) -> list[tuple[int, int, int]]:
    """Returns the meshes of a number of devices to try, the smallest tensor axis first.

    The tensor axis divides the key-value heads of every policy; the fsdp axis divides the largest
    one that leaves each device at least 128 columns of a policy's width, for every policy; the data
    axis takes the other devices.
    """
    shapes = []
    sizes = [n for c in policies for n in (c.num_kv_heads, c.intermediate_size, c.vocab_size)]
    largest = math.gcd(devices, *sizes)
    for tensor in range(1, largest + 1):
        if largest % tensor == 0:
            fsdp = math.gcd(*(widest_fsdp(devices // tensor, c.hidden_size) for c in policies))
            shapes.append((devices // tensor // fsdp, fsdp, tensor))
    return shapes


def candidates(job: Job, policies: Sequence[DecoderConfig], devices: int) -> Iterator[Job]:
    """Yields changed runs in the order of their expected speed."""
    tokens = job.packing.tokens_per_device
    longest = max(job.packing.row_lengths)
    sizes = [n for n in (tokens >> i for i in range(HALVINGS + 1)) if n >= min(longest, tokens)]
    # The last varies first: smaller batches cost less speed than recomputation or narrow products.
    for mesh, remat, size in itertools.product(meshes(policies, devices), REMATS, sizes):
        packing = dataclasses.replace(job.packing, tokens_per_device=size)
        yield dataclasses.replace(job, mesh=mesh, remat=remat, packing=packing)


def fit(job: Job, policies: Sequence[DecoderConfig], devices: int, plan: Plan) -> dict[str, Any]:
    """Returns the plan of the first candidate that fits, with its `changes` of the config.

    If no candidate fits, the first one does that fits without the exact index, which `changes`
    then replaces. `UserError` if none does, or the memory is unknown.
    """
    least, without_index = None, dict[str, Any]()
    error: TooLargeError | None = None
    for candidate, result in _plans(job, policies, devices, plan):
        if isinstance(result, TooLargeError):
            error = result
            continue
        if result["memory_bytes"] is None:
            raise UserError(
                f"the memory of {result['device']!r} is unknown, so nothing can be fitted: "
                "name a TPU or GPU with --topology"
            )
        if result["peak_bytes"] < result["memory_bytes"]:
            return result | {"changes": changes(job, candidate)}
        if not without_index and result["index_place"].get("place") == SERVER:
            without_index = result | {"changes": {**changes(job, candidate), **REMOTE}}
        least = min(least or result["peak_bytes"], result["peak_bytes"])
    if without_index:
        return without_index
    if least is None:
        assert error is not None  # there is always a candidate
        raise error
    raise UserError(
        f"no mesh, remat and batch size fit {devices} devices; the smallest needs "
        f"{least / 2**30:.1f} GiB per device: take more devices, or see docs/howto/memory.md"
    )


def _plans(
    job: Job, policies: Sequence[DecoderConfig], devices: int, plan: Plan
) -> Iterator[tuple[Job, dict[str, Any] | TooLargeError]]:
    """Yields candidates with their plans, or with the error of a program that is too large."""
    # The memory of sampling depends on the mesh alone.
    without_sampler = set[tuple[int, ...]]()
    for candidate in candidates(job, policies, devices):
        if candidate.mesh in without_sampler:
            continue
        try:
            result: dict[str, Any] | TooLargeError = plan(candidate)
        except TooLargeError as error:
            result = error
            without_sampler |= {candidate.mesh} if error.program == SAMPLING else set()
        yield candidate, result


def changes(job: Job, candidate: Job) -> Mapping[str, Any]:
    """Returns the keys of the config whose values differ, with the new values."""
    old, new = (
        {
            "mesh": x.mesh,
            "remat": x.remat,
            "packing.tokens_per_device": x.packing.tokens_per_device,
        }
        for x in (job, candidate)
    )
    return {name: value for name, value in new.items() if old[name] != value}
