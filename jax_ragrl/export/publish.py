"""Uploads an exported folder to the Hugging Face Hub.

A repository is created, or its permissions are checked, before the export begins: a missing token
is reported at once, not after minutes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from jax_ragrl.errors import UserError
from jax_ragrl.runtime.hub import one_line

# A repository of the user's own may be given without its owner.
TARGET = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
MESSAGE = "Export of jax_ragrl"


class Target(NamedTuple):
    """The repository `OWNER/NAME` on the Hub that an export is uploaded to."""

    name: str
    url: str
    is_private: bool


def reserve(name: str, *, public: bool = False) -> Target:
    """Creates a repository `[OWNER/]NAME`, or returns the one that exists.

    An existing repository keeps its visibility. `UserError` if the name is malformed or belongs to
    something else, the token is missing or may not write, the Hub does not answer, or the
    repository is public without `public`.
    """
    from huggingface_hub import HfApi

    if not TARGET.fullmatch(name):
        raise UserError(f"--push-to is {name!r}: give OWNER/NAME, such as my-name/my-policy")
    api = HfApi()
    try:
        url = api.create_repo(name, private=not public, exist_ok=True)
        info = api.model_info(url.repo_id)
    except Exception as error:  # the exceptions of its HTTP library have changed before
        raise UserError(explain_push(error, name)) from error
    target = Target(url.repo_id, str(url), bool(info.private))
    if not (target.is_private or public):
        raise UserError(
            f"{target.name} on the Hub is public already: give --public to upload there, or "
            "another name"
        )
    return target


def upload(folder: Path, target: Target) -> None:
    """Uploads a folder; `UserError` names the command that repeats a failed upload."""
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=target.name, folder_path=str(folder), commit_message=MESSAGE)
    except Exception as error:  # as above
        raise UserError(
            f"{explain_push(error, target.name)}; {folder} is complete, and "
            f"'hf upload {target.name} {folder}' uploads it"
        ) from error


def explain_push(error: Exception, name: str) -> str:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 or isinstance(error, errors.LocalTokenNotFoundError):
        return (
            f"the Hub accepts no upload to {name} without a valid token: set HF_TOKEN to one "
            f"that can write ({hub}/settings/tokens), or run 'hf auth login'"
        )
    if status == 403:
        return (
            f"the token may not write to {name}: use a token with the permission to write, and an "
            "owner that is you or an organization of yours"
        )
    if status == 404:
        return f"{name} on the Hub exists but is not a model, or was renamed: give another name"
    if constants.HF_HUB_OFFLINE:
        return f"{name} cannot be written while HF_HUB_OFFLINE is set: unset it"
    return (
        f"uploading to {name} on {hub} failed ({one_line(error.__cause__ or error)}): check the "
        "network and run the command again"
    )
