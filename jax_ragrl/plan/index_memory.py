"""Memory of the indexes of a run, from the sizes of their files: nothing is read or allocated.

A part of an index is on the devices, in the memory of each host, or memory-mapped: the system then
reads its pages when they are used, drops them when memory is short, and shares them among the
processes of a host.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import bm25
from jax_ragrl.retrieval.description import PASSAGES, files_folder, read_description
from jax_ragrl.retrieval.exact import padded, share_of_first
from jax_ragrl.retrieval.int8 import CODES, SCALES
from jax_ragrl.retrieval.kinds import INT8, BM25Index, Index, PipelineIndex, VectorIndex
from jax_ragrl.retrieval.scann import BRUTE_FORCE
from jax_ragrl.run.pipeline import placed_sections

Places = dict[str, dict[str, int]]


def index_memory(index: Index, devices: int) -> dict[str, dict[str, Any]]:
    """Returns the bytes of each local index by place and content, given the devices of a host.

    Returns:
      Per index, by its folder: kind, count, `device_bytes` of the fullest device, `host_bytes` and
      `mapped_bytes` per host; or `unknown`, the reason. Servers have no entry.
    """
    return {
        part.folder or part.kind: _counted(part.folder, devices)
        for part in parts_of(index)
        if isinstance(part, VectorIndex | BM25Index)
    }


def parts_of(index: Index) -> Iterator[Index]:
    """Yields the retrievers of a config, each with its own folder if that is known."""
    if not isinstance(index, PipelineIndex):
        yield index
    elif index.folder:
        yield from placed_sections(index, pathlib.Path(index.folder))
    else:
        yield from index.sections


def _counted(folder: str, devices: int) -> dict[str, Any]:
    if not folder:
        unknown = "it is not built yet: build it with 'ragrl data index' and name index.folder"
        return {"unknown": unknown}
    try:
        description, files = read_description(folder), files_folder(folder)
        places = _places(description, files, devices)
    except (UserError, KeyError) as error:
        return {"unknown": str(error)}
    # A pipeline keeps the passages one folder above its indexes.
    for place in (files, files.parent):
        if bytes_in := folder_bytes(place / PASSAGES):
            places["mapped_bytes"]["passages"] = bytes_in
            break
    return {"kind": description["kind"], "count": description["count"], **places}


def _places(description: Mapping[str, Any], files: pathlib.Path, devices: int) -> Places:
    """Returns the bytes of an index without its passages."""
    if description["kind"] == BM25Index.kind:
        arrays = {path.name: path.stat().st_size for path in (files / bm25.FOLDER).glob("*.npy")}
        words = folder_bytes(files / bm25.FOLDER) - sum(arrays.values())
        return _place(host={"words": words}, mapped={"bm25": sum(arrays.values())})
    count, width = description["count"], description["dimension"]
    if description["kind"] == "scann":
        if count < BRUTE_FORCE:
            return _place(host={"vectors": 4 * count * width})
        return _place(host={"scann": folder_bytes(files / "scann")})
    mapped = {name: folder_bytes(files / name) for name in ("vectors", CODES, SCALES)}
    rows = padded(share_of_first(count, devices))
    name = description.get("dtype", "float32")
    # The scale of a vector in eight bits is a float32.
    size = rows * (width * jnp.dtype(name).itemsize + 4 * (name == INT8))
    vectors = {CODES if name == INT8 else "vectors": size}
    return _place(vectors, {}, {name: size for name, size in mapped.items() if size})


def _place(
    device: dict[str, int] | None = None,
    host: dict[str, int] | None = None,
    mapped: dict[str, int] | None = None,
) -> Places:
    return {"device_bytes": device or {}, "host_bytes": host or {}, "mapped_bytes": mapped or {}}


def folder_bytes(folder: pathlib.Path) -> int:
    """Returns the bytes of all files in a folder; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
