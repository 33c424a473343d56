"""The resident memory of this process."""

from __future__ import annotations

import pathlib
import resource
import sys

STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Lets the peak of `peak_bytes` start at the current size, if the system can do so (Linux)."""
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return  # the peak then remains that of the whole process


def peak_bytes() -> int:
    """Returns the largest resident size since `reset_peak`, in bytes."""
    if STATUS.is_file():
        lines = STATUS.read_text(encoding="ascii", errors="ignore").splitlines()
        sizes = dict(line.split(":", 1) for line in lines if ":" in line)
        if "VmHWM" in sizes:
            return 1024 * int(sizes["VmHWM"].split()[0])
    # `ru_maxrss` is in bytes on macOS and in kilobytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
