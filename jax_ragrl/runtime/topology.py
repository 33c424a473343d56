"""Devices that one does not have, described well enough to compile for them.

A TPU's are described by libtpu, a GPU's by the CUDA plugin of JAX and the numbers below.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from jax.experimental import topologies

from jax_ragrl.errors import UserError


class Chip(NamedTuple):
    """What the compiler asks of a GPU: compute capability, processors, memory in bytes and bytes a
    second, its second-level cache, GHz, the shared memory of a processor and of a block, and how
    many threads a processor holds."""

    capability: tuple[int, int]
    processors: int
    memory: int
    bandwidth: int
    cache: int
    clock: float
    shared: int
    shared_block: int
    threads: int = 2048


# By the makers' data sheets; memory as `nvidia-smi` or JAX tells it.
GPUS = {
    "a100": Chip((8, 0), 108, 84_987_740_160, 2_039 * 10**9, 40 << 20, 1.41, 167_936, 166_912),
    "h100": Chip((9, 0), 132, 84_942_979_072, 3_352 * 10**9, 50 << 20, 1.98, 233_472, 232_448),
    "h200": Chip((9, 0), 132, 151_397_597_184, 4_800 * 10**9, 50 << 20, 1.98, 233_472, 232_448),
    "b200": Chip((10, 0), 148, 183_359 << 20, 8_000 * 10**9, 126 << 20, 1.96, 233_472, 232_448),
    "a6000": Chip((8, 6), 84, 49_140 << 20, 768 * 10**9, 6 << 20, 1.80, 102_400, 101_376, 1536),
    "l4": Chip((8, 9), 58, 23_034 << 20, 300 * 10**9, 48 << 20, 2.04, 102_400, 101_376, 1536),
    "l40s": Chip((8, 9), 142, 46_068 << 20, 864 * 10**9, 96 << 20, 2.52, 102_400, 101_376, 1536),
    "rtx4090": Chip(
        (8, 9), 128, 24_564 << 20, 1008 * 10**9, 72 << 20, 2.52, 102_400, 101_376, 1536
    ),
}
# By the kind that the compiler names, in GiB.
TPU_MEMORY = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32, "TPU7x": 96}
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared}
  shared_memory_per_block_optin: {chip.shared_block}
  threads_per_core_limit: {chip.threads}
  core_count: {chip.processors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {chip.bandwidth}
  device_memory_size: {chip.memory}
  l2_cache_size: {chip.cache}
  clock_rate_ghz: {chip.clock}
  cuda_compute_capability {{ major: {chip.capability[0]} minor: {chip.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def describe_devices(topology: str) -> list[Any]:
    """The devices of a TPU topology such as `v5e:4x4`, or of one host of GPUs such as `h100:8`.

    Raises `UserError` where the name is not known, or libtpu or JAX's CUDA plugin is missing.
    """
    try:
        if gpus := re.fullmatch(rf"({'|'.join(GPUS)})(?::(\d+))?", topology):
            return _gpus(gpus[1], int(gpus[2] or 1))
        # The two cores of a chip are one device, as JAX has them there; later kinds are by default.
        options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
        described = topologies.get_topology_desc(topology, "tpu", **options)
        return list(described.devices)
    except Exception as error:
        told = str(error).splitlines()[0]
        raise UserError(
            f"no topology {topology!r} ({told}): for a TPU install libtpu and name one like "
            "v5e:4x4, v5p:2x2x4 or v6e:8x8; for GPUs install jax[cuda13] or jax[cuda12] and name "
            f"{', '.join(f'{name}:8' for name in GPUS)} or another number of them"
        ) from error


def _gpus(name: str, count: int) -> list[Any]:
    target = TARGET.format(chip=GPUS[name], name=name)
    described = topologies.get_topology_desc(
        name, "cuda", target_config=target, topology=f"1x1x{count}"
    )
    return list(described.devices)


def is_gpu(device: Any) -> bool:
    """Whether a described or a real device is an NVIDIA GPU."""
    return device.platform in ("gpu", "cuda")


def memory_of(device: Any) -> int | None:
    """Bytes that JAX may use of a described device, None where its kind is not known.

    Of a GPU's it takes three quarters, or `XLA_PYTHON_CLIENT_MEM_FRACTION`.
    """
    if device.device_kind in GPUS:
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        return int(GPUS[device.device_kind].memory * share)
    return TPU_MEMORY.get(device.device_kind, 0) * 2**30 or None
