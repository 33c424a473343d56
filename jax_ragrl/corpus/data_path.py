"""Names of data files: a path, a file of this package, or a file on the Hugging Face Hub."""

from __future__ import annotations

import pathlib
import re

from jax_ragrl.corpus.builtin import data_file
from jax_ragrl.runtime.hub import download_data_file, is_uri, parse_data_file

SPLITS = ("train", "dev", "validation", "test")  # such a file name does not name the data set
# A file of a split is often divided: train-00000-of-00004.parquet.
PART = re.compile(r"-\d+-of-\d+$")


def data_path(name: str | pathlib.Path) -> pathlib.Path:
    """Returns the local path of a data file.

    Args:
      name: a path; `nq:train` and the like (`corpus/builtin.py`); or
        `hf://datasets/OWNER/NAME[@REVISION]/PATH`, which is downloaded once.

    Raises:
      UserError: the name is not a path on this machine, or the download failed.
    """
    return download_data_file(name) if is_uri(name) else data_file(name)


def set_name(name: str | pathlib.Path) -> str:
    """Returns the name of a question file's data set.

    This is the file name up to its first dot, or the folder's name if the file is named for a
    split. On the Hub a folder `data` or no folder stands for the repository.
    """
    if not is_uri(name):
        path = data_file(name)
        stem = path.name.split(".")[0]
        # Resolved first, because a relative path such as `train.jsonl` has no parent name.
        return path.resolve().parent.name if stem in SPLITS else stem
    # Not from the copy in the cache, whose folder is named for a commit.
    file = parse_data_file(name)
    *folders, last = file.path.split("/")
    stem = PART.sub("", last.split(".")[0])
    if stem not in SPLITS:
        return stem
    folder = next(iter(folders[-1:]), "data")
    return file.repository.rpartition("/")[2] if folder == "data" else folder
