"""The commit of this checkout and the device, which measurements name."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess

from jax_ragrl.version import __version__


def revision() -> str:
    """Returns the commit of this checkout, or the version of an installed package."""
    folder = pathlib.Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return __version__


def device_name() -> str:
    """Returns the number and kind of the devices, or of the cores if there is no accelerator."""
    import jax

    first = jax.devices()[0]
    if first.platform == "cpu":
        return f"{os.cpu_count()} CPU cores"
    return f"{jax.device_count()} {first.device_kind}"


def versions() -> dict[str, str]:
    """Returns the versions of the packages whose code computes, and the kind of the devices."""
    import jax

    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    numbers = {name: str(importlib.import_module(name).__version__) for name in packages}
    return {"jax_ragrl": __version__, **numbers, "device": jax.devices()[0].device_kind}
