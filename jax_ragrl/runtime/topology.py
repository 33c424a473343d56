"""Descriptions of devices that are not present, detailed enough to compile for them; speeds.

libtpu describes TPUs; the CUDA plugin of JAX, with the numbers below, describes GPUs. Speeds are
the manufacturers' numbers, not measurements.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from jax.experimental import topologies

from jax_ragrl.errors import UserError


class Chip(NamedTuple):
    """The properties of a GPU that the compiler uses.

    Fields:
      capability: the compute capability, (major, minor).
      processors: streaming multiprocessors.
      memory: bytes.
      cache: bytes of the second-level cache.
      clock: GHz.
      shared: bytes of shared memory per processor.
      shared_block: bytes of shared memory per block.
      threads: threads per processor.
    """

    capability: tuple[int, int]
    processors: int
    memory: int
    cache: int
    clock: float
    shared: int
    shared_block: int
    threads: int = 2048


# From the data sheets of the manufacturer; memory as `nvidia-smi` or JAX reports it.
GPUS = {
    "a100": Chip((8, 0), 108, 84_987_740_160, 40 << 20, 1.41, 167_936, 166_912),
    "h100": Chip((9, 0), 132, 84_942_979_072, 50 << 20, 1.98, 233_472, 232_448),
    "h200": Chip((9, 0), 132, 151_397_597_184, 50 << 20, 1.98, 233_472, 232_448),
    "b200": Chip((10, 0), 148, 183_359 << 20, 126 << 20, 1.96, 233_472, 232_448),
    "a6000": Chip((8, 6), 84, 49_140 << 20, 6 << 20, 1.80, 102_400, 101_376, 1536),
    "l4": Chip((8, 9), 58, 23_034 << 20, 48 << 20, 2.04, 102_400, 101_376, 1536),
    "l40s": Chip((8, 9), 142, 46_068 << 20, 96 << 20, 2.52, 102_400, 101_376, 1536),
    "rtx4090": Chip((8, 9), 128, 24_564 << 20, 72 << 20, 2.52, 102_400, 101_376, 1536),
}


class Ceilings(NamedTuple):
    """Speeds of one device.

    Fields:
      flops: dense bfloat16 operations per second.
      bandwidth: bytes per second of device memory.
      link: bytes per second to all neighbors in one direction, by NVLink or else PCI Express.
    """

    flops: float
    bandwidth: float
    link: float


# By the kind of a described device. A TPU7x chip is two devices.
CEILINGS = {
    "a100": Ceilings(312e12, 2039e9, 300e9),
    "h100": Ceilings(989e12, 3352e9, 450e9),
    "h200": Ceilings(989e12, 4800e9, 450e9),
    "b200": Ceilings(2250e12, 8000e9, 900e9),
    "a6000": Ceilings(154.8e12, 768e9, 32e9),
    "l4": Ceilings(121e12, 300e9, 32e9),
    "l40s": Ceilings(362e12, 864e9, 32e9),
    "rtx4090": Ceilings(165.2e12, 1008e9, 32e9),
    "TPU v4": Ceilings(275e12, 1228e9, 300e9),
    "TPU v5 lite": Ceilings(197e12, 819e9, 200e9),
    "TPU v5": Ceilings(459e12, 2765e9, 600e9),
    "TPU v6 lite": Ceilings(918e12, 1640e9, 448e9),
    "TPU7x": Ceilings(2307e12 / 2, 7380e9 / 2, 600e9 / 2),
}
# In GiB, by the compiler's name of the kind.
TPU_MEMORY = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32, "TPU7x": 96}
# Variables of JAX, the second one deprecated.
MEMORY_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
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
  memory_bandwidth: {bandwidth:.0f}
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
    """Returns the devices of a TPU topology (`v5e:4x4`) or of one host of GPUs (`h100:8`).

    `UserError` if the name is unknown, or libtpu or JAX's CUDA plugin is missing.
    """
    try:
        if not topology:
            raise ValueError("the name is empty")  # libtpu would describe a TPU v2
        if gpus := re.fullmatch(rf"({'|'.join(GPUS)})(?::([1-9]\d*))?", topology):
            name, place, platform = gpus[1], f"1x1x{gpus[2] or 1}", "cuda"
            target = TARGET.format(chip=GPUS[name], bandwidth=CEILINGS[name].bandwidth, name=name)
            options = {"target_config": target, "topology": place}
        else:
            name, platform = topology, "tpu"
            # On v4, JAX presents the two cores of a chip as one device; later kinds do by default.
            options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
        return list(topologies.get_topology_desc(name, platform, **options).devices)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"no topology {topology!r} ({reason}): for a TPU install libtpu and name one like "
            "v5e:4x4, v5p:2x2x4 or v6e:8x8; for GPUs install jax[cuda13] or jax[cuda12] and name "
            f"{', '.join(f'{name}:8' for name in GPUS)} or another number of them"
        ) from error


def is_gpu(device: Any) -> bool:
    """Returns whether a device, real or described, is an NVIDIA GPU."""
    return device.platform in ("gpu", "cuda")


def memory_of(device: Any) -> int | None:
    """Returns the bytes that JAX may use of a described device; None if its kind is unknown.

    By default JAX uses three quarters of a GPU's memory; the variables `MEMORY_SHARE` change it.
    `UserError` if they give no share.
    """
    if device.device_kind in GPUS:
        text = next(filter(None, map(os.environ.get, MEMORY_SHARE)), "0.75")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            names = " or ".join(MEMORY_SHARE)
            raise UserError(f"{names} is {text!r}: give a share above 0 and up to 1, such as 0.92")
        return int(GPUS[device.device_kind].memory * share)
    return TPU_MEMORY.get(device.device_kind, 0) * 2**30 or None
