"""A lock on a folder or a file of results: one process at a time writes to it."""

from __future__ import annotations

import os
import pathlib
import socket
import sys
import time
from typing import IO

from jax_ragrl.errors import UserError

try:
    import fcntl
except ImportError:  # Windows, whose file system would need another call
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
POLL_SECONDS = 1.0
# Open files, because closing one releases its lock. The system releases the locks of a process
# however it ends, so that no stale lock stops a run that resumes.
_locks: dict[pathlib.Path, IO[str]] = {}


def lock_folder(folder: pathlib.Path, place: str = "--workdir") -> None:
    """Locks a folder, which may be new, for the rest of this process.

    `UserError`, which names the option `place`, if another process holds the lock. A file system
    without locks (some network mounts) is not locked.
    """
    _lock(folder.resolve() / FILE, folder, place)


def lock_output(out: pathlib.Path, place: str = "--out") -> None:
    """Locks a file of results by a file next to it; arguments and errors as in `lock_folder`."""
    _lock(out.resolve().with_name(f".{out.name}{FILE}"), out, place)


def lock_unless_done(folder: pathlib.Path, result: pathlib.Path) -> bool:
    """Locks a folder as `lock_folder` does, or waits until another process has its result.

    If that process ends without the result, this one gets the lock and can continue. A folder with
    its result is neither locked nor written. Returns whether this call has locked the folder.
    """
    path, former_owner = folder.resolve() / FILE, ""
    was_locked = path in _locks
    while not result.is_file() and (owner := _try_lock(path)):
        if owner != former_owner:
            print(f"ragrl: waiting for {result} of {owner}", file=sys.stderr, flush=True)
        former_owner = owner
        time.sleep(POLL_SECONDS)
    return path in _locks and not was_locked


def _lock(path: pathlib.Path, results: pathlib.Path, place: str) -> None:
    if owner := _try_lock(path):
        raise UserError(
            f"{results} is in use by {owner}, and two runs would overwrite each other's files: "
            f"wait for its end, or choose another {place}"
        )


def _try_lock(path: pathlib.Path) -> str:
    """Locks a file; returns the name of another process that holds it, or an empty one."""
    if fcntl is None or path in _locks:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        return owner
    except OSError:
        file.close()
        return ""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locks[path] = file
    return ""


def unlock_folder(folder: pathlib.Path) -> None:
    """Releases the lock of `lock_folder`, if this process holds it."""
    if (file := _locks.pop(folder.resolve() / FILE, None)) is not None:
        file.close()
