"""XLA flags of the tests."""

from __future__ import annotations


def flags(devices: int) -> str:
    """Returns flags for a number of virtual CPU devices.

    Programs are not optimized, because tests compile longer than they compute. Notebooks and the
    quickstart run with the flags of a user.
    """
    return f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
