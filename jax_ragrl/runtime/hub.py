"""The Hugging Face Hub: a file of a data set, and why a download failed, on one line.

`huggingface_hub` reads `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` and draws the
progress bars. It is imported within functions, because most commands need nothing of the Hub.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import re
from pathlib import Path
from urllib.parse import unquote

from jax_ragrl.errors import UserError

SCHEME = "hf:/"  # with one slash, because `pathlib` merges the two
# hf://datasets/OWNER/NAME[@REVISION]/PATH, as in fsspec and `datasets`. The two kinds of revisions
# that may contain a slash are the Hub's own; a branch with a slash is written with %2F.
DATA_FILE = re.compile(
    r"hf:/{1,2}datasets/(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)"
    r"(@(?P<revision>refs/convert/[\w.-]+|refs/pr/\d+|[^/]+))?/(?P<path>[^@]+)",
    re.ASCII,
)
MODEL, DATA_SET = "model", "data set"


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file in the data set `OWNER/NAME` on the Hub, at a branch, tag or commit."""

    repository: str
    path: str
    revision: str | None = None


def is_uri(name: str | Path) -> bool:
    """Whether a name begins as an address on the Hub does (`hf://`)."""
    return str(name).startswith(SCHEME)


def parse_data_file(uri: str | Path) -> DataFile:
    """Parses `hf://datasets/OWNER/NAME[@REVISION]/PATH`; `UserError` for any other text."""
    match = DATA_FILE.fullmatch(str(uri))
    if match is None or match["path"].endswith("/"):
        raise UserError(
            f"{uri} is not a file of a data set on the Hub: write "
            "hf://datasets/OWNER/NAME/PATH, or hf://datasets/OWNER/NAME@REVISION/PATH"
        )
    return DataFile(match["name"], match["path"], match["revision"] and unquote(match["revision"]))


def download_data_file(uri: str | Path) -> Path:
    """The local copy of `hf://datasets/OWNER/NAME[@REVISION]/PATH`; `UserError` if it cannot be.

    A revision that the Hub's cache holds is used without asking the Hub again, as for models: a run
    that is resumed reads the same questions, even if the branch has moved since.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    file = parse_data_file(uri)
    download = functools.partial(
        hf_hub_download, file.repository, file.path, repo_type="dataset", revision=file.revision
    )
    try:
        return Path(download(local_files_only=True))
    # The second call repeats the error of a name that the Hub cannot have.
    except (HFValidationError, LocalEntryNotFoundError):
        pass
    try:
        return Path(download())
    except Exception as error:  # the exceptions of its HTTP library have changed before
        message = _explain_file(error, file) or explain(
            error, file.repository, file.revision, DATA_SET
        )
        raise UserError(message) from error


def _explain_file(error: Exception, file: DataFile) -> str:
    """The message if only the file is missing in its data set; empty for another error."""
    from huggingface_hub import constants, errors

    # A miss in the cache has the same base class, but means that the network failed.
    is_miss = isinstance(error, errors.LocalEntryNotFoundError)
    if is_miss or not isinstance(error, errors.EntryNotFoundError):
        return ""
    page = f"{constants.ENDPOINT}/datasets/{file.repository}/tree/{file.revision or 'main'}"
    return f"{file.repository} on the Hub has no file {file.path!r}: choose one listed at {page}"


def explain(error: Exception, repository: str, revision: str | None, kind: str = MODEL) -> str:
    """The message for a download that failed: the request, the cause and the remedy."""
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    place, option = ("datasets/", "--repo-type dataset ") if kind == DATA_SET else ("", "")
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repository} is gated: ask for access at {hub}/{place}{repository}, then set "
            "HF_TOKEN or run 'hf auth login'"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} on the Hub has no revision {revision!r}: give a branch, tag or commit"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {repository} in {cache}: free some, or set HF_HOME"
    prefix = f"{repository!r} is not a folder on this machine, and " if kind == MODEL else ""
    if isinstance(error, errors.HFValidationError):
        problem = f"the Hub can have no {kind} of this name ({one_line(error)})"
        remedy = "correct the path or the name"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = f"there is no {kind} {repository!r} on {hub}"
        remedy = "check the name and, if it is private, set HF_TOKEN"
    elif constants.HF_HUB_OFFLINE:
        problem = f"the cache {cache} lacks files of {repository}, and HF_HUB_OFFLINE is set"
        remedy = f"unset it, or run 'hf download {option}{repository}' first"
    else:
        reason = one_line(error.__cause__ or error)
        problem = f"downloading {kind} {repository!r} from {hub} failed ({reason})"
        remedy = "check the name and the network, or set HF_ENDPOINT to a mirror"
    return f"{prefix}{problem}: {remedy}"


def one_line(error: BaseException) -> str:
    """The type and the beginning of the message of an exception."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
