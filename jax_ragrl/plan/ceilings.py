"""Data-sheet speeds of devices, and the time that a program takes at least.

They are the manufacturers' numbers, not measurements: dense bfloat16 products, device memory, and
all links of a device to its neighbors in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_ragrl.runtime.topology import GPUS


class Ceilings(NamedTuple):
    """Speeds of one device.

    Fields:
      flops: bfloat16 operations per second.
      bandwidth: bytes per second of device memory.
      link: bytes per second to other devices.
    """

    flops: float
    bandwidth: float
    link: float


# Of a GPU: operations without sparsity, and NVLink or else PCI Express. The bandwidths are in GPUS.
GPU_SPEEDS = {
    "a100": (312e12, 300e9),
    "h100": (989e12, 450e9),
    "h200": (989e12, 450e9),
    "b200": (2250e12, 900e9),
    "a6000": (154.8e12, 32e9),
    "l4": (121e12, 32e9),
    "l40s": (362e12, 32e9),
    "rtx4090": (165.2e12, 32e9),
}
# By the compiler's name of the kind. A TPU7x chip is two devices.
TPU_CEILINGS = {
    "TPU v4": Ceilings(275e12, 1228e9, 300e9),
    "TPU v5 lite": Ceilings(197e12, 819e9, 200e9),
    "TPU v5": Ceilings(459e12, 2765e9, 600e9),
    "TPU v6 lite": Ceilings(918e12, 1640e9, 448e9),
    "TPU7x": Ceilings(2307e12 / 2, 7380e9 / 2, 600e9 / 2),
}


def ceilings_of(device: Any) -> Ceilings | None:
    """Returns the speeds of a described device; None if its kind is unknown, such as a CPU."""
    kind = device.device_kind
    if kind in GPUS:
        flops, link = GPU_SPEEDS[kind]
        return Ceilings(flops, GPUS[kind].bandwidth, link)
    return TPU_CEILINGS.get(kind)


def time_at_least(work: Mapping[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """Returns the seconds of a program that uses one of the ceilings fully.

      seconds = max(flops / peak, hbm bytes / bandwidth, collective bytes / link)

    Source: Williams et al. 2009 (roofline). Real programs are slower: they overlap imperfectly.
    `work` has `flops`, `hbm_bytes` and `collectives` per device; the result `seconds_at_least`, and
    `bound`: compute, memory or network.
    """
    # Kinds of collectives share the links of a device, so their bytes add.
    network = sum(kind["bytes"] for kind in work["collectives"].values())
    seconds = {
        "compute": work["flops"] / ceilings.flops,
        "memory": work["hbm_bytes"] / ceilings.bandwidth,
        "network": network / ceilings.link,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return {"seconds_at_least": seconds[bound], "bound": bound}
