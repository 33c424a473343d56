"""Checkpoints of a run (Orbax), taken at update boundaries; a resumed run continues exactly.

A checkpoint holds every array of the training state under its path, and a JSON object with the
step, the state of the question iterator and the array shapes.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from jax_ragrl.errors import UserError
from jax_ragrl.runtime.multihost import by_first


class Checkpoints:
    """The checkpoints of a work folder: `checkpoints/<step>`, written atomically."""

    def __init__(self, workdir: pathlib.Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self.folder = (workdir / "checkpoints").resolve()
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """The newest complete step; None where there is none."""
        return by_first(self._manager.latest_step)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Saves in the background; an unfinished checkpoint is never seen by `latest`."""
        arrays = by_path(state)
        meta = {**meta, "step": step, "shapes": shapes_of(state)}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta)
            ),
        )

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state of a step in the tree of `like`, and its JSON object.

        Of `like` shapes, dtypes and layouts are read, which `jax.ShapeDtypeStruct` has too. Raises
        `UserError` where the checkpoint is of another model shape.
        """
        meta = self._meta(step)
        self._check(step, meta["shapes"], shapes_of(like))
        return self._read(step, like), meta

    def restore_part(self, step: int, like: Any) -> Any:
        """As `restore`, of the paths that `like` has: the others are not read."""
        wanted, saved = shapes_of(like), self._meta(step)["shapes"]
        self._check(step, {k: v for k, v in saved.items() if k in wanted}, wanted)
        return self._read(step, like)

    def _meta(self, step: int) -> dict[str, Any]:
        item = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta: dict[str, Any] = self._manager.restore(step, args=item)["meta"]
        return meta

    def _read(self, step: int, like: Any) -> Any:
        wanted = by_path(abstract(like))
        layouts = ocp.checkpoint_utils.construct_restore_args(wanted)
        part = ocp.args.PyTreeRestore(wanted, restore_args=layouts, partial_restore=True)
        found = self._manager.restore(step, args=ocp.args.Composite(state=part))["state"]
        return jax.tree.unflatten(jax.tree.structure(like), [found[path] for path in wanted])

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _check(self, step: int, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        for path in sorted(saved.keys() | wanted.keys()):
            if saved.get(path) != wanted.get(path):
                raise UserError(
                    f"checkpoint {self.folder / str(step)} has {path} of shape {saved.get(path)}, "
                    f"but this config makes {wanted.get(path)}: use the config it was made with, "
                    "or another --workdir"
                )


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree under their paths, in the tree's own order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def shapes_of(tree: Any) -> dict[str, list[int]]:
    """The shapes of a tree's leaves under their paths."""
    return {path: list(leaf.shape) for path, leaf in by_path(tree).items()}


def abstract(tree: Any) -> Any:
    """A tree without its arrays: shapes, dtypes and layouts."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
