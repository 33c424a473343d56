"""Runs on a disk that becomes full: a small tmpfs, or a limit on the size of files."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import resource
import subprocess
from collections.abc import Iterator

from tests.chaos.runs import Outcome, Variant, call, digest, train_command

TMPFS = {"a checkpoint": 45, "the second checkpoint": 75}  # MiB
FILES = {"a checkpoint": 1 << 20, "the index": 100_000, "trees": 40_000, "metrics": 3_000}  # bytes


@dataclasses.dataclass(frozen=True)
class Full:
    """A run on a full disk, and its continuation once there is space."""

    name: str
    first: Outcome
    expected: str
    actual: str

    @property
    def is_named(self) -> bool:
        message = "".join(self.first.messages())
        return self.first.codes == (2,) and ("full" in message or "ulimit" in message)

    @property
    def is_good(self) -> bool:
        return self.is_named and self.actual == self.expected


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, megabytes: int) -> Iterator[pathlib.Path]:
    """Mounts a tmpfs at a folder; only root can.

    Raises:
      OSError: this user cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        raise PermissionError(f"{folder}: this user cannot mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=False)


def grow(folder: pathlib.Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Limits the size of the files that this process writes, in bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def on_small_disk(variant: Variant, folder: pathlib.Path, name: str, expected: str) -> Full:
    """Trains on a tmpfs, then again after it has grown.

    Args:
      variant: the kind of run.
      folder: the place of the tmpfs.
      name: a key of `TMPFS`.
      expected: the digest of an undisturbed run.
    """
    with small_disk(folder, TMPFS[name]) as disk:
        first = call(train_command(variant, disk / "run"), disk / "run")
        grow(disk)
        return _continued(variant, disk / "run", f"tmpfs: {name}", first, expected)


def with_small_files(variant: Variant, folder: pathlib.Path, name: str, expected: str) -> Full:
    """Trains with a limit on the size of files, then without.

    Args:
      variant: the kind of run.
      folder: the folder of the run.
      name: a key of `FILES`.
      expected: the digest of an undisturbed run.
    """
    with small_files(FILES[name]):
        first = call(train_command(variant, folder), folder)
    return _continued(variant, folder, f"file limit: {name}", first, expected)


def _continued(
    variant: Variant, workdir: pathlib.Path, name: str, first: Outcome, expected: str
) -> Full:
    last = call(train_command(variant, workdir), workdir)
    return Full(name, first, expected, digest(workdir) if last.is_success else last.output[-2000:])
