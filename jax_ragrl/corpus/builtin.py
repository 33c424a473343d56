"""Data files that ship with the package, by name, such as `mixture:train`.

Each set is a folder of `data/` with a note on its sources and licenses:

  nq       Natural Questions, one hop
  mixture  the questions and passages of Natural Questions, HotpotQA and 2WikiMultiHopQA
  musique  MuSiQue, two to four hops, for tests alone
"""

from __future__ import annotations

import importlib.resources
import pathlib
import re

from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError

SETS = {
    "nq": ("corpus", "train", "dev", "test"),
    "mixture": ("corpus", "train", "dev", "test"),
    "musique": ("corpus", "test"),
}
NAME = re.compile(rf"({'|'.join(SETS)}):(.*)")


def data_file(path: str | pathlib.Path) -> pathlib.Path:
    """Returns a path on this machine, or the packaged file that a name such as `nq:train` means.

    Raises:
      UserError: there is no such packaged file, or the path is not local (see `schema.local`).
    """
    match = NAME.fullmatch(str(path))
    if match is None:
        return local(path)
    if match[2] not in SETS[match[1]]:
        names = ", ".join(f"{match[1]}:{file}" for file in SETS[match[1]])
        raise UserError(f"{str(path)!r} is not a packaged data file: use one of {names}")
    folder = pathlib.Path(str(importlib.resources.files("jax_ragrl"))) / "data" / match[1]
    return folder / f"{match[2]}.jsonl.gz"
