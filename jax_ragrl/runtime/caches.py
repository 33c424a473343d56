"""The folder of the user's caches, and files and folders that appear complete or not at all."""

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
DRAFT = ".unfinished-"


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
def draft_file(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a draft, which replaces `file` at the end.

    A kill or a full disk leaves the former file. A device or a pipe is written itself.
    """
    if file.exists() and not file.is_file():
        yield file
        return
    file = file.resolve()  # a link remains one
    draft = file.with_name(f"{file.name}.tmp")
    try:
        yield draft
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def write_text(file: pathlib.Path, text: str, errors: str = "strict") -> None:
    """Writes a file in UTF-8 atomically; `errors` as in `str.encode`."""
    with draft_file(file) as draft:
        draft.write_text(text, encoding="utf-8", errors=errors)


@contextlib.contextmanager
def new_files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a draft folder, whose files appear in `folder` at the end, each of them complete.

    Files that a killed call has left are replaced by equal ones. `UserError`, and no new file, if
    another file has a name of theirs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with draft_folder(folder, DRAFT) as draft:
        yield draft
        files = sorted(draft.iterdir())
        for file in files:
            other = folder / file.name
            if other.exists() and other.read_bytes() != file.read_bytes():
                raise UserError(
                    f"{other} exists, and is not what this command writes: give another folder "
                    "with --out, or remove it"
                )
        for file in files:
            file.replace(folder / file.name)


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
