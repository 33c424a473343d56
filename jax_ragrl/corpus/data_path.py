"""Names of data files: a path, a file of this package, or a file on the Hugging Face Hub."""

from __future__ import annotations

import os
import pathlib
import re

from jax_ragrl.corpus.builtin import data_file
from jax_ragrl.runtime.hub import download_data_file, is_uri, parse_data_file

SPLITS = ("train", "dev", "validation", "test")  # such a file name does not name the data set
# A file of a split is often divided: train-00000-of-00004.parquet.
PART = re.compile(r"-\d+-of-\d+$")


def data_path(name: str | pathlib.Path) -> pathlib.Path:
    """Returns the local path of a data file, or the local paths of several, separated by commas.

    Args:
      name: a path or a pattern; `nq:train` and the like (`corpus/builtin.py`); or
        `hf://datasets/OWNER/NAME[@REVISION]/PATH`, which is downloaded once; or several of them,
        separated by commas, see `formats.look.data_files`.

    Raises:
      UserError: the name is not a path on this machine, or the download failed.
    """
    parts = str(name).split(",")
    if len(parts) > 1 and not os.path.exists(name):
        return pathlib.Path(
            ",".join(str(data_path(part.strip())) for part in parts if part.strip())
        )
    return download_data_file(name) if is_uri(name) else data_file(name)


def set_name(name: str | pathlib.Path, *, with_split: bool = False) -> str:
    """Returns the name of a question file's data set.

    This is the file name up to its first dot, or the folder's name if the file is named for a
    split. On the Hub a folder `data` or no folder stands for the repository.

    Args:
      name: the file, see `data_path`.
      with_split: whether the split follows the folder's name (`FOLDER/test`), so that a table shows
        which file was read.
    """
    if not is_uri(name):
        path = data_file(name)
        stem = PART.sub("", path.name.split(".")[0])
        if stem not in SPLITS:
            return stem
        # Resolved first, because a relative path such as `train.jsonl` has no parent name.
        folder = path.resolve().parent.name
        return f"{folder}/{stem}" if with_split else folder
    # Not from the copy in the cache, whose folder is named for a commit.
    file = parse_data_file(name)
    *folders, last = file.path.split("/")
    stem = PART.sub("", last.split(".")[0])
    if stem not in SPLITS:
        return stem
    folder = next(iter(folders[-1:]), "data")
    return file.repository.rpartition("/")[2] if folder == "data" else folder
