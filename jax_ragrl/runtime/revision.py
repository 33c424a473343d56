"""The commit of this checkout, which measurements name."""

from __future__ import annotations

import pathlib
import subprocess

from jax_ragrl import __version__


def revision() -> str:
    """Returns the commit of this checkout, or the version of an installed package."""
    folder = pathlib.Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return __version__
