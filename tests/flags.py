"""What XLA is told for tests."""

from __future__ import annotations


def flags(devices: int) -> str:
    """So many virtual CPU devices; programs are not optimised, for tests compile more than they
    compute. Notebooks and quickstart run what users run."""
    return f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
