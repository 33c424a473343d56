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
from jax_ragrl.hosts import by_first


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
        meta = {**meta, "step": step, "shapes": {k: list(v.shape) for k, v in arrays.items()}}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta)
            ),
        )

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state of a step in the tree of `like`, and its JSON object.

        Raises `UserError` where the checkpoint is of another model shape.
        """
        item = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = self._manager.restore(step, args=item)["meta"]
        arrays = by_path(like)
        self._check(step, meta["shapes"], {k: list(v.shape) for k, v in arrays.items()})
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)
        item = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        restored = self._manager.restore(step, args=item)["state"]
        leaves = [restored[path] for path in arrays]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), meta

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
