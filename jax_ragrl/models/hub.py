"""Models on the Hugging Face Hub, downloaded once into the cache that all of its tools share.

A revision that the cache holds in full is used without asking the Hub again: a run that is resumed
starts from the same weights, even if the branch has moved since. If another tool filled the cache,
small files of the same commit are added.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax_ragrl.errors import UserError
from jax_ragrl.models.safetensors_io import INDEX, SINGLE, weight_map_of
from jax_ragrl.runtime.hub import explain

# OWNER/NAME, or OWNER/NAME@REVISION with a branch, a tag or a commit.
NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>.+))?", re.ASCII)
# fnmatch patterns, whose * also matches a slash: the files of sentence-transformers' modules too.
CARD = "README.md"  # names the license, which the card of an export repeats
SMALL = ("*.json", "*.jinja", "*.model", "*merges.txt", "*vocab.txt", CARD)
# Other formats of the same weights, and their copies of the small files.
OTHER_FORMATS = ("onnx/*", "openvino/*", "original/*", "coreml/*")


def download(name: str, *, weights: bool = True) -> Path:
    """The folder of `OWNER/NAME[@REVISION]` in the Hub's cache, after downloading what it lacks.

    `weights`: whether the safetensors files are needed too. `UserError` if there is no such model
    or revision, it has no weights, access is denied, the Hub does not answer, or the disk is full.
    """
    match = NAME.fullmatch(name)
    assert match, f"{name} is not a name on the Hub"
    repository, revision = match["name"], match["revision"]
    cached = _cached(repository, revision)
    # Other tools may have fetched a config or a tokenizer only.
    needed = ("config.json", "tokenizer_config.json")
    is_whole = cached and all(any(cached.rglob(name)) for name in needed)
    if cached and is_whole and (_has_weights(cached) or not weights):
        # Transformers fetches neither the card nor, for example, the pooling of an encoder, so the
        # card shows that `download` has been here.
        if not (cached / CARD).is_file():
            with contextlib.suppress(UserError):
                return _snapshot(repository, cached.name, SMALL)  # its name is the commit
        return cached
    folder = _snapshot(repository, revision, SMALL)
    if weights and not _has_weights(folder):
        # The commit of the first download: a branch may move in between.
        _snapshot(repository, folder.name, tuple(_weight_files(folder)))
        _check_weights(folder, name)
    return folder


def _cached(repository: str, revision: str | None) -> Path | None:
    """The folder of a revision in the cache; None if the cache has no file of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # A pattern that matches no file: the folder is wanted even if it is not complete.
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=[], local_files_only=True
        )
    # Of a name that the Hub cannot have, the cache has no file; the download explains the error.
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(folder)


def _has_weights(folder: Path) -> bool:
    indexes = list(folder.rglob(INDEX))
    if not indexes:
        return any(folder.rglob(SINGLE))
    return all((folder / file).is_file() for file in _weight_files(folder))


def _weight_files(folder: Path) -> Iterator[str]:
    """Paths, relative to `folder`, of the weights that its indexes name; patterns without one."""
    indexes = list(folder.rglob(INDEX))
    if not indexes:
        yield from (SINGLE, f"*/{SINGLE}")
    for index in indexes:
        place = index.parent.relative_to(folder)
        files = set(weight_map_of(index).values())
        yield from ((place / file).as_posix() for file in sorted(files))


def _check_weights(folder: Path, name: str) -> None:
    if _has_weights(folder):
        return
    if (folder / "adapter_config.json").is_file():
        reason = "it is an adapter: merge it into its base model and give that folder"
    elif not (folder / "config.json").is_file():
        reason = "it has no config.json; for a repository of GGUF files, download one and give it"
    else:
        reason = "convert its weights with Transformers' save_pretrained and give that folder"
    raise UserError(f"{name} on the Hub has no {SINGLE}: {reason}")


def _snapshot(repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Downloads the files that match; a failure becomes a `UserError` of one line."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(OTHER_FORMATS),
        )
    except Exception as error:  # the classes of its HTTP library differ between versions
        raise UserError(explain(error, repository, revision)) from error
    return Path(folder)
