"""Checkpoints of a run (Orbax), written after updates; a resumed run continues bit-exactly.

A checkpoint holds every array of the training state under its path in the tree, and a JSON object
with the step, the state of the question iterator, the shapes and checksums of the arrays, and a
checksum of itself. Values that are bytes, such as rollouts in flight, are another item.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import warnings
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.multihost import on_process_zero
from jax_ragrl.runtime.sharding import to_host

T = TypeVar("T")

CONTENTS = "contents"  # the item of values that are bytes
META_SUM = "meta_checksum"  # the checksum of the other entries of the JSON object
BEST = "best"  # the folder of the policies with the best score, see `training/best.py`


class DamagedCheckpointError(UserError):
    """The files of a checkpoint cannot be read, or hold other values than were saved."""


class Checkpoints:
    """The checkpoints of a run directory: `checkpoints/<step>`, written atomically."""

    def __init__(self, workdir: pathlib.Path, subfolder: str = "checkpoints", *, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        # Orbax requires absolute paths.
        self.folder = (workdir / subfolder).resolve()
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        return on_process_zero(self._manager.latest_step)

    def steps(self) -> list[int]:
        return sorted(on_process_zero(self._manager.all_steps))

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Saves a tree of arrays in the background; `latest` ignores unfinished checkpoints.

        `meta` are values for the JSON object; values of type `bytes`, not empty, are another item.
        Raises `UserError` if there is a checkpoint of this step or of a later one.
        """
        contents = {name: x for name, x in meta.items() if isinstance(x, bytes)}
        # Flat paths instead of the tree: a checkpoint does not depend on Python classes.
        arrays = by_path(state)
        sums = {path: [str(arrays[path].dtype), n] for path, n in checksums(arrays).items()}
        meta = {name: x for name, x in meta.items() if name not in contents}
        meta |= {"step": step, "shapes": shapes_of(state), "checksums": sums}
        meta |= {CONTENTS: {name: zlib.crc32(x) for name, x in contents.items()}}
        meta[META_SUM] = _json_checksum(meta)
        items = {"state": ocp.args.PyTreeSave(arrays), "meta": ocp.args.JsonSave(meta)}
        if contents:
            data = {name: np.frombuffer(x, np.uint8) for name, x in contents.items()}
            items[CONTENTS] = ocp.args.PyTreeSave(data)
        if not self._manager.save(step, args=ocp.args.Composite(**items)):
            newest = self.folder / str(self._manager.latest_step())
            raise UserError(
                f"checkpoint {step} is not saved, because {newest} is not older: remove that "
                "folder, or choose another --workdir"
            )

    def delete_from(self, step: int) -> None:
        """Deletes the checkpoints of `step` and of later steps; after it, `step` can be saved."""
        for later in self.steps():
            if later >= step:
                self._manager.delete(later)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the state of a step in the structure of `like`, and `meta` as it was saved.

        Only shapes, dtypes and shardings of `like` are used: `jax.ShapeDtypeStruct` is enough.
        Raises `UserError` if the checkpoint has other array shapes, `DamagedCheckpointError` if it
        is damaged.
        """
        meta = self.meta(step)
        self._check(step, meta["shapes"], shapes_of(like))
        return self._read(step, like, meta), meta | self._contents(step, meta)

    def restore_newest(self, like: Any) -> tuple[int, Any, dict[str, Any]]:
        """Restores the newest checkpoint that is not damaged; also returns its step.

        A damaged checkpoint is renamed to `damaged-<step>` with a warning, so that its step can be
        saved again. `UserError` if every checkpoint is damaged, or the shapes are others.
        """
        damage: DamagedCheckpointError | None = None
        while (step := self.latest()) is not None:
            try:
                return (step, *self.restore(step, like))
            except DamagedCheckpointError as error:
                # Processes could see different damage and then continue from different steps.
                if jax.process_count() > 1:
                    raise
                damage = error
                self._set_aside(step)
        raise UserError(
            f"{self.folder} has no intact checkpoint, the oldest one is damaged too ({damage}): "
            "restore the folder from a backup, or choose another --workdir"
        )

    def _set_aside(self, step: int) -> None:
        # A step that was saved again may be damaged again.
        suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        names = (f"damaged-{step}{suffix}" for suffix in suffixes)
        name = next(name for name in names if not (self.folder / name).exists())
        (self.folder / str(step)).rename(self.folder / name)
        self._manager.reload()
        warnings.warn(
            f"checkpoint {step} in {self.folder} is damaged: it is renamed to {name}, and the run "
            "continues from the checkpoint before",
            stacklevel=3,
        )

    def restore_part(self, step: int, like: Any) -> Any:
        """Restores only the paths that `like` has; the other arrays are not read."""
        shapes, meta = shapes_of(like), self.meta(step)
        self._check(step, {k: v for k, v in meta["shapes"].items() if k in shapes}, shapes)
        return self._read(step, like, meta)

    def meta(self, step: int) -> dict[str, Any]:
        """Returns the JSON object of a checkpoint; `DamagedCheckpointError` if it is damaged."""
        item = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = self._reading(step, lambda: self._manager.restore(step, args=item)["meta"])
        if not isinstance(meta, dict):
            raise self._damage(step, "its metadata is incomplete")
        # One flipped bit could rename an array, or change the step or the place in the questions.
        if meta.pop(META_SUM, None) != _json_checksum(meta):
            raise self._damage(step, "its metadata has other values than were saved")
        return meta

    def _reading(self, step: int, read: Callable[[], T]) -> T:
        try:
            return read()
        # Orbax and TensorStore raise many types for a file that is cut, empty or missing.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            if not (folder := self.folder / str(step)).exists():
                raise UserError(
                    f"checkpoint {folder} was removed while it was read: a run that trains keeps "
                    "its newest ones alone; run the same command again"
                ) from error
            raise self._damage(step, f"{type(error).__name__}: {reason}") from error

    def _damage(self, step: int, cause: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"checkpoint {self.folder / str(step)} is damaged ({cause}): remove this folder to use "
            "the checkpoint before"
        )

    def _read(self, step: int, like: Any, meta: dict[str, Any]) -> Any:
        items = by_path(abstract(like))
        # Arrays are read directly into their shardings.
        layouts = ocp.checkpoint_utils.construct_restore_args(items)
        part = ocp.args.PyTreeRestore(items, restore_args=layouts, partial_restore=True)
        args = ocp.args.Composite(state=part)
        arrays = self._reading(step, lambda: self._manager.restore(step, args=args)["state"])
        # An array that is read in another dtype has another checksum.
        expected_sums = {
            path: n
            for path, (dtype, n) in meta["checksums"].items()
            if path in items and dtype == str(arrays[path].dtype)
        }
        sums = checksums({path: arrays[path] for path in expected_sums})
        if wrong := [path for path, value in sums.items() if value != expected_sums[path]]:
            raise self._damage(step, f"{wrong[0]} has other values than were saved")
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in items])

    def _contents(self, step: int, meta: dict[str, Any]) -> dict[str, bytes]:
        if not (sums := meta[CONTENTS]):
            return {}
        args = ocp.args.Composite(**{CONTENTS: ocp.args.PyTreeRestore()})
        arrays = self._reading(step, lambda: self._manager.restore(step, args=args)[CONTENTS])
        contents = {name: np.asarray(x).tobytes() for name, x in arrays.items()}
        if wrong := [name for name, crc in sums.items() if zlib.crc32(contents[name]) != crc]:
            raise self._damage(step, f"{wrong[0]} has other bytes than were saved")
        return contents

    def wait(self) -> int | None:
        """Waits for unfinished writes; returns the newest step, or None if there is none."""
        self._manager.wait_until_finished()
        return self.latest()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def _check(self, step: int, saved_shapes: dict[str, Any], shapes: dict[str, Any]) -> None:
        # Checked before any array is read; the first difference in order of paths is reported.
        for path in sorted(saved_shapes.keys() | shapes.keys()):
            if saved_shapes.get(path) != shapes.get(path):
                raise UserError(
                    f"checkpoint {self.folder / str(step)} has {path} of shape "
                    f"{saved_shapes.get(path)}, but this config needs {shapes.get(path)}: use the "
                    "config of that run, or another --workdir"
                )


def _json_checksum(values: dict[str, Any]) -> int:
    # JSON turns tuples into lists, and keys that are numbers into texts.
    # The result has to be the same before and after the object is saved.
    file_values = json.loads(json.dumps(values))
    return zlib.crc32(json.dumps(file_values, sort_keys=True).encode())


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, in the order of the tree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def shapes_of(tree: Any) -> dict[str, list[int]]:
    return {path: list(leaf.shape) for path, leaf in by_path(tree).items()}


def abstract(tree: Any) -> Any:
    """Returns a tree with shapes, dtypes and shardings in place of arrays."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def checksums(arrays: dict[str, Any]) -> dict[str, int]:
    """Returns the checksum of each array, computed on its devices; elements of at most 4 bytes.

      checksum(x) = sum_i bits(x_i) (2 i + 1)  mod 2^32

    A flipped bit k changes the sum by 2^k (2 i + 1), which is not a multiple of 2^32. The sum is
    independent of the sharding, and no array leaves its devices.
    """
    sums = to_host(_checksums(list(arrays.values())))
    return {path: int(value) for path, value in zip(arrays, sums, strict=True)}


@in_order
@jax.jit
def _checksums(arrays: list[Array]) -> list[Array]:
    return [_checksum(x) for x in arrays]


def _checksum(x: Array) -> Array:
    number = jnp.zeros(x.shape, jnp.uint32)
    # From the number of each axis, because a reshape to one axis would gather a sharded array.
    for axis in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        number = number + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    wide = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[wide.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(wide, unsigned).astype(jnp.uint32)
    return jnp.sum(bits * (np.uint32(2) * number + np.uint32(1)), dtype=jnp.uint32)
