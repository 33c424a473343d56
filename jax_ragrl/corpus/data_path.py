"""Names of data files: a path, a file of this package, or a file on the Hugging Face Hub."""

from __future__ import annotations

import importlib.resources
import os
import pathlib
import re

from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.runtime.hub import download_data_file, is_uri, parse_data_file

SPLITS = ("train", "dev", "validation", "test")  # such a file name does not name the data set
# A file of a split is often divided: train-00000-of-00004.parquet.
PART = re.compile(r"-\d+-of-\d+$")
# The data that ships with the package, such as `mixture:train`. Each set is a folder of `data/`
# with a note on its sources and licenses: Natural Questions (one hop); questions and passages of
# it, HotpotQA and 2WikiMultiHopQA, with replies of a frozen model for `llm.replies`; MuSiQue (two
# to four hops), for tests alone.
SETS = {
    "nq": ("corpus", "train", "dev", "test"),
    "mixture": ("corpus", "train", "dev", "test", "replies"),
    "musique": ("corpus", "test"),
}
PACKAGED = re.compile(rf"({'|'.join(SETS)}):(.*)")


def data_path(name: str | pathlib.Path) -> pathlib.Path:
    """Returns the local path of a data file, or the local paths of several, separated by commas.

    A name is a path or a pattern; `nq:train` and the like; or
    `hf://datasets/OWNER/NAME[@REVISION]/PATH`, which is downloaded once.

    Raises:
      UserError: the name is not a path on this machine, or the download failed.
    """
    parts = str(name).split(",")
    if len(parts) > 1 and not os.path.exists(name):
        return pathlib.Path(
            ",".join(str(data_path(part.strip())) for part in parts if part.strip())
        )
    return download_data_file(name) if is_uri(name) else data_file(name)


def data_file(path: str | pathlib.Path) -> pathlib.Path:
    """Returns a path, or the packaged file that `nq:train` means; `UserError` if it is missing."""
    match = PACKAGED.fullmatch(str(path))
    if match is None:
        return local(path)
    if match[2] not in SETS[match[1]]:
        names = ", ".join(f"{match[1]}:{file}" for file in SETS[match[1]])
        raise UserError(f"{str(path)!r} is not a packaged data file: use one of {names}")
    folder = pathlib.Path(str(importlib.resources.files("jax_ragrl"))) / "data" / match[1]
    # `ragrl replies` compresses by xz.
    return folder / f"{match[2]}.jsonl.{'xz' if match[2] == 'replies' else 'gz'}"


def set_name(name: str | pathlib.Path, *, with_split: bool = False) -> str:
    """Returns the name of a question file's data set.

    This is the file name up to its first dot, or the folder's name if the file is named for a
    split, which follows it in `with_split` (`FOLDER/test`). On the Hub a folder `data` or no folder
    stands for the repository.
    """
    # Of the Hub not from the copy in the cache, whose folder is named for a commit.
    file = parse_data_file(name) if is_uri(name) else None
    path = pathlib.PurePath(file.path) if file else data_file(name)
    stem = PART.sub("", path.name.split(".")[0])
    if stem not in SPLITS:
        return stem
    if file:
        folder = path.parent.name or "data"
        return file.repository.rpartition("/")[2] if folder == "data" else folder
    # Resolved first, because a relative path such as `train.jsonl` has no parent name.
    folder = pathlib.Path(path).resolve().parent.name
    return f"{folder}/{stem}" if with_split else folder
