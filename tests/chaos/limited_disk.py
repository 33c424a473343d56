"""Runs on a disk that becomes full: a small tmpfs, or a limit on the size of files.

`python -m tests.chaos.limited_disk BYTES COMMAND` runs `ragrl COMMAND` with that limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import resource
import subprocess
import sys
from collections.abc import Iterator

from tests.chaos.runs import Outcome, Variant, digest, train

MODULE = "tests.chaos.limited_disk"
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
        return self.first.codes == (2,) and "full" in "".join(self.first.messages())

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


def on_small_disk(variant: Variant, folder: pathlib.Path, name: str, expected: str) -> Full:
    """Trains on a tmpfs, then again after it has grown.

    Args:
      variant: the kind of run.
      folder: the place of the tmpfs.
      name: a key of `TMPFS`.
      expected: the digest of an undisturbed run.
    """
    with small_disk(folder, TMPFS[name]) as disk:
        first = train(variant, disk / "run")
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
    first = train(variant, folder, module=(MODULE, str(FILES[name])))
    return _continued(variant, folder, f"file limit: {name}", first, expected)


def _continued(
    variant: Variant, workdir: pathlib.Path, name: str, first: Outcome, expected: str
) -> Full:
    last = train(variant, workdir)
    return Full(name, first, expected, digest(workdir) if last.is_success else last.output[-2000:])


if __name__ == "__main__":
    from jax_ragrl.cli.main import main

    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.exit(main(sys.argv[2:]))
