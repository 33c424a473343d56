"""The folder of a supervised training: its config, and its checkpoints until the model is written.

The same command continues an interrupted training, and the result is bit-identical.
`out/config.json` tells whether it is the same command. `out/unfinished` holds the checkpoints;
`out/checkpoint`, which appears only when it is complete, is the model.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import Preempted, UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.run.lock import lock_folder
from jax_ragrl.run.preemption import StopNotice, stop_notice

FOLDER, MODEL = "unfinished", "checkpoint"


def claim_folder(values: Mapping[str, Any], out: pathlib.Path) -> None:
    """Locks a folder and makes a config its only one; the config may change until a result exists.

    The folder stays locked for the rest of this process, as that of a run.

    Raises:
      UserError: another process uses the folder, or it holds results of another config, or a model
        without a config.
    """
    # First: a config or a model may be in the middle of its writing by another process.
    lock_folder(out, "--out")
    file, model = out / "config.json", out / MODEL
    if model.exists() and not file.exists():
        raise UserError(
            f"{model} exists already, and no {file.name} names its config: choose another --out"
        )
    has_results = model.exists() or any((out / FOLDER).glob("checkpoints/*"))
    save_config(file, values, renew=not has_results, place="--out")


class Unfinished:
    """The checkpoints of a training that has not ended."""

    def __init__(self, checkpoints: Checkpoints, notice: StopNotice, save_every: int):
        self._checkpoints, self._notice, self._save_every = checkpoints, notice, save_every

    def restore(self, state: Any) -> tuple[int, Any, dict[str, Any]]:
        """Returns the newest intact step, its state and its entries; without one 0, `state`, {}."""
        if self._checkpoints.latest() is None:
            return 0, state, {}
        return self._checkpoints.restore_newest(state)

    def end_step(
        self,
        step: int,
        state: Any,
        entries: Callable[[], dict[str, Any]] = dict,
        *,
        is_milestone: bool = False,
    ) -> None:
        """Saves after a step if it is time to, or a milestone, or if the process shall end.

        `entries` returns further values to save, and is called before a save alone.

        Raises:
          Preempted: the process received SIGTERM; the step is saved.
        """
        stop = self._notice.reached(step)
        is_due = self._save_every > 0 and step % self._save_every == 0
        if is_due or is_milestone or stop:
            self._checkpoints.save(step, state, entries())
        if stop:
            raise Preempted(f"stopped after step {step}: the same command continues")


@contextlib.contextmanager
def open_unfinished(out: pathlib.Path, save_every: int) -> Iterator[Unfinished]:
    """Opens the checkpoints of a training; SIGTERM ends it after its step.

    With `save_every` 0, only milestones and a step that SIGTERM ends are saved.
    """
    with contextlib.closing(Checkpoints(out / FOLDER)) as checkpoints, stop_notice() as notice:
        yield Unfinished(checkpoints, notice, save_every)


def remove_unfinished(out: pathlib.Path) -> None:
    """Removes the checkpoints, after the model is written: until then a run resumes from them."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)
