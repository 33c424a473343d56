"""Memory mappings of this process, of which Linux allows a limited number (65,530 by default).

On a CPU, XLA maps each kernel of a program on its own: a program of a model with 30 layers has over
1,500 mappings. At the limit, compiling ends the process with a segmentation fault.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import tqdm

MAPPINGS = pathlib.Path("/proc/self/maps")
LIMIT = pathlib.Path("/proc/sys/vm/max_map_count")
MAX_SHARE = 0.75  # the largest programs need some 3 % of the default limit each


def free_programs_at_limit(mappings: pathlib.Path = MAPPINGS, limit: pathlib.Path = LIMIT) -> bool:
    """Drops all compiled programs if this process is close to the limit; returns whether it did.

    Dropped programs are compiled again, or read from the compilation cache, when they are called.
    """
    try:
        with mappings.open("rb") as lines:
            count, maximum = sum(1 for _ in lines), int(limit.read_text())
    except (OSError, ValueError):  # not Linux
        return False
    if count < MAX_SHARE * maximum:
        return False
    jax.clear_caches()
    message = (
        f"ragrl: warning: dropped the compiled programs: {count} of {maximum} memory "
        "mappings were in use. A higher vm.max_map_count (sysctl) avoids it"
    )
    tqdm.tqdm.write(message, file=sys.stderr)
    return True
