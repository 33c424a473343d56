"""Checkpoints of a run (Orbax), written after updates; a resumed run continues bit-exactly.

A checkpoint holds every array of the training state under its path in the tree, and a JSON object
with the step, the state of the question iterator and the array shapes.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from jax_ragrl.errors import UserError
from jax_ragrl.runtime.multihost import on_process_zero


class Checkpoints:
    """The checkpoints of a run directory: `checkpoints/<step>`, written atomically."""

    def __init__(self, workdir: pathlib.Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        # Orbax requires absolute paths.
        self.folder = (workdir / "checkpoints").resolve()
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """Returns the newest complete step; None if there is none."""
        return on_process_zero(self._manager.latest_step)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Saves in the background; `latest` ignores unfinished checkpoints.

        Args:
          step: number of finished updates.
          state: a tree of arrays.
          meta: values for the JSON object.
        """
        # Flat paths instead of the tree: a checkpoint does not depend on Python classes.
        arrays = by_path(state)
        meta = {**meta, "step": step, "shapes": shapes_of(state)}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta)
            ),
        )

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the state of a step in the structure of `like`, and the JSON object.

        Only shapes, dtypes and shardings of `like` are used: `jax.ShapeDtypeStruct` is enough.
        Raises `UserError` if the checkpoint has other array shapes.
        """
        meta = self._meta(step)
        self._check(step, meta["shapes"], shapes_of(like))
        return self._read(step, like), meta

    def restore_part(self, step: int, like: Any) -> Any:
        """Restores only the paths that `like` has; the other arrays are not read."""
        shapes, saved_shapes = shapes_of(like), self._meta(step)["shapes"]
        self._check(step, {k: v for k, v in saved_shapes.items() if k in shapes}, shapes)
        return self._read(step, like)

    def _meta(self, step: int) -> dict[str, Any]:
        item = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta: dict[str, Any] = self._manager.restore(step, args=item)["meta"]
        return meta

    def _read(self, step: int, like: Any) -> Any:
        items = by_path(abstract(like))
        # Arrays are read directly into their shardings.
        layouts = ocp.checkpoint_utils.construct_restore_args(items)
        part = ocp.args.PyTreeRestore(items, restore_args=layouts, partial_restore=True)
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=part))["state"]
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in items])

    def close(self) -> None:
        """Waits for unfinished writes and closes the manager."""
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


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, in the order of the tree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def shapes_of(tree: Any) -> dict[str, list[int]]:
    """Returns the shapes of the leaves of a tree by path."""
    return {path: list(leaf.shape) for path, leaf in by_path(tree).items()}


def abstract(tree: Any) -> Any:
    """Returns a tree with shapes, dtypes and shardings in place of arrays."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
