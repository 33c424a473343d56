"""`index.json` of an index folder, and the subfolder that has the files of the newest version.

An index that was updated has its files in `update-N`, which `index.json` names: replacing this one
file replaces the index. The files of the former version are deleted afterwards.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import shutil
import zlib
from collections.abc import Mapping
from typing import Any

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads
from jax_ragrl.retrieval.kinds import BM25Index, PipelineIndex

FILE = "index.json"
PASSAGES = "passages"
VERSION = "folder"  # the key of the subfolder; absent if the files are in the folder itself
READING = "reading"  # the key of `Corpus.reading`, by which an update reads further passages
UPDATE = re.compile(r"update-(\d+)")
# The keys of every index and the keys of an index of vectors, with the types of their values.
FACTS = {"corpus": str, "kind": str, "count": int}
VECTOR_FACTS = {"encoder": dict, "dimension": int}


def read_description(folder: pathlib.Path | str) -> dict[str, Any]:
    """Reads `index.json` of a folder; raises `UserError` if it holds no complete index."""
    path = pathlib.Path(folder) / FILE
    try:
        description = loads(path.read_bytes())
    except (OSError, ValueError):
        description = None
    if not _is_complete(description):
        raise UserError(
            f"{folder} holds no complete index ({FILE}): run 'ragrl data index' first, or delete "
            "the folder if 'ragrl train' made it"
        )
    return description


def _is_complete(description: Any) -> bool:
    if not isinstance(description, dict):
        return False
    has_vectors = description.get("kind") not in (BM25Index.kind, PipelineIndex.kind)
    facts = FACTS | (VECTOR_FACTS if has_vectors else {})
    encoder, reading = description.get("encoder", {"kind": ""}), description.get(READING, {})
    return (
        all(isinstance(description.get(name), kind) for name, kind in facts.items())
        and (isinstance(encoder, dict) and isinstance(encoder.get("kind"), str))
        and isinstance(reading, dict)
    )


def encoder_source(description: Mapping[str, Any]) -> str:
    """Returns the name or folder of the encoder of an index."""
    encoder = description.get("encoder", {"kind": "none"})
    return str(encoder.get("source", encoder["kind"]))


def encoder_checksum(encoder: Mapping[str, Any]) -> str:
    """Returns a checksum of what an encoder says of itself, without its path: a folder may move."""
    return f"{zlib.crc32(json.dumps({**encoder, 'source': ''}, sort_keys=True).encode()):08x}"


def reading_facts(corpus: Corpus) -> dict[str, Any]:
    """Returns the entry of `index.json` on how a corpus was read; empty if that is unknown."""
    return {} if corpus.reading is None else {READING: dict(corpus.reading)}


def check_corpus(folder: pathlib.Path, description: dict[str, Any], corpus: Corpus) -> None:
    """Raises `UserError` if the index of a folder was built for another corpus."""
    if description["corpus"] != corpus.fingerprint:
        raise UserError(
            f"index {folder} was built for corpus {description['corpus']}, but "
            f"{corpus.fingerprint} is loaded: rerun 'ragrl data index', or give the corpus "
            "it was built for"
        )


def files_folder(folder: pathlib.Path | str) -> pathlib.Path:
    """Returns the folder with the files of an index; errors as `read_description`."""
    return pathlib.Path(folder) / read_description(folder).get(VERSION, "")


def next_version(folder: pathlib.Path) -> str:
    """Returns the name of the subfolder of the next update; a killed update has the same one."""
    current = UPDATE.fullmatch(read_description(folder).get(VERSION, ""))
    return f"update-{int(current[1]) + 1 if current else 1}"


def drop_versions(folder: pathlib.Path) -> None:
    """Deletes the files of all versions of an index but the newest."""
    newest = read_description(folder).get(VERSION, "")
    for path in folder.iterdir():
        is_update = UPDATE.fullmatch(path.name)
        is_base = path.is_dir() and path.name in BASE
        if path.name != newest and (is_update or (is_base and newest)):
            with contextlib.suppress(OSError):  # the index is whole without the deletion
                shutil.rmtree(path)


# The subfolders of an index that was never updated.
BASE = ("passages", "vectors", "codes", "scales", "encoder", "scann", "bm25")
