"""The folder of the user's caches, and folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from jax_ragrl.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: drafts of killed processes stay there
    fcntl = None  # type: ignore[assignment]

VARIABLE = "RAGRL_CACHE"


def cache_folder() -> pathlib.Path:
    """The folder of all caches: `RAGRL_CACHE`, or one below the user's, who must have a home."""
    if own := os.environ.get(VARIABLE):
        return pathlib.Path(own)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise UserError(f"there is no folder for caches ({error}): set {VARIABLE}") from error
    return pathlib.Path(home) / "jax_ragrl"


@contextlib.contextmanager
def draft_folder(folder: pathlib.Path, prefix: str) -> Iterator[pathlib.Path]:
    """Yields a new folder within `folder`, which is removed at the end unless it was renamed.

    Drafts that killed processes have left are removed first; nothing else has names with `prefix`.
    """
    with contextlib.ExitStack() as stack:
        # Until a draft is locked, nobody may look for drafts without an owner.
        with _lock(folder):
            _remove_unlocked(folder, prefix)
            draft = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            stack.callback(shutil.rmtree, draft, ignore_errors=True)
            stack.enter_context(_lock(draft))
        yield draft


def remove_drafts(folder: pathlib.Path, prefix: str) -> None:
    """Removes the drafts in a folder that killed processes have left; arguments as above."""
    if any(folder.glob(f"{prefix}*")):
        with contextlib.suppress(OSError), _lock(folder):
            _remove_unlocked(folder, prefix)


def _remove_unlocked(folder: pathlib.Path, prefix: str) -> None:
    for draft in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _lock(draft, wait=False) as is_locked:
            if is_locked:
                shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: pathlib.Path, *, wait: bool = True) -> Iterator[bool]:
    """Locks a folder, which the system unlocks if the process is killed.

    Yields whether it is locked; False on a file system without locks. Without `wait`, a lock of
    another process is a `BlockingIOError`.
    """
    if fcntl is None:
        yield False
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        is_locked = True
        try:
            fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(number)
