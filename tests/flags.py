"""XLA flags of the tests."""

# Without the fusion emitters and in one part, a program compiles in less than half the CPU time.
# XLA ignores an extra option that it does not know. Most tests optimize less still: `conftest.py`.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def flags(devices: int) -> str:
    """Returns flags for a number of virtual CPU devices, with programs that compile fast.

    Notebooks and the quickstart run with the flags of a user.
    """
    return " ".join((f"--xla_force_host_platform_device_count={devices}", *FAST_COMPILATION))
