"""What this process holds of its system: memory, open files, memory mappings and threads."""

from __future__ import annotations

import pathlib
import resource
from typing import NamedTuple

from jax_ragrl.errors import UserError

PROCESS = pathlib.Path("/proc/self")


class Usage(NamedTuple):
    """Numbers of this process at one time.

    Fields:
      rss_bytes: its resident memory.
      handles: its open files, sockets and pipes.
      mappings: its memory mappings; see `runtime.mappings`.
      threads: its threads, with the ones of libraries.
    """

    rss_bytes: int
    handles: int
    mappings: int
    threads: int


def usage(process: pathlib.Path = PROCESS) -> Usage:
    """Returns the numbers of a process.

    Args:
      process: its folder in `/proc`.

    Raises:
      UserError: the system has no such folder.
    """
    try:
        pages = int((process / "statm").read_text(encoding="ascii").split()[1])
        handles, threads = (sum(1 for _ in (process / x).iterdir()) for x in ("fd", "task"))
        with (process / "maps").open("rb") as lines:
            mappings = sum(1 for _ in lines)
    except OSError as error:
        raise UserError(f"{process} cannot be read ({error}): measure on Linux") from error
    return Usage(pages * resource.getpagesize(), handles, mappings, threads)
