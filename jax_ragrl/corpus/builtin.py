"""Data files that ship with the package, by name: `nq:corpus`, `nq:train`, `nq:dev`, `nq:test`."""

from __future__ import annotations

import importlib.resources
import pathlib
import re

from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError

SETS = ("nq",)
FILES = ("corpus", "train", "dev", "test")
NAME = re.compile(rf"({'|'.join(SETS)}):(.*)")


def data_file(path: str | pathlib.Path) -> pathlib.Path:
    """Returns a path on this machine, or the packaged file that a name such as `nq:train` means.

    Raises:
      UserError: there is no such packaged file, or the path is not local (see `schema.local`).
    """
    match = NAME.fullmatch(str(path))
    if match is None:
        return local(path)
    if match[2] not in FILES:
        names = ", ".join(f"{match[1]}:{file}" for file in FILES)
        raise UserError(f"{str(path)!r} is not a packaged data file: use one of {names}")
    folder = pathlib.Path(str(importlib.resources.files("jax_ragrl"))) / "data" / match[1]
    return folder / f"{match[2]}.jsonl.gz"
