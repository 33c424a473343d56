"""A run and one of its checkpoints: `RUN`, `RUN@newest`, `RUN@best` or `RUN@STEP`."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import BEST, Checkpoints

NEWEST = "newest"


class RunCheckpoint(NamedTuple):
    """The folder of a run, and the name of a checkpoint: `newest`, `best` or a step."""

    folder: pathlib.Path
    name: str = NEWEST

    def open(self) -> tuple[Checkpoints, int]:
        """Returns the checkpoints and the step of this one; `UserError` if there is none."""
        subfolder = BEST if self.name == BEST else "checkpoints"
        folder = self.folder / subfolder
        if not folder.is_dir():  # Orbax would create it
            raise UserError(f"{folder} holds no checkpoint: run 'ragrl train' first")
        checkpoints = Checkpoints(self.folder, subfolder)
        steps = checkpoints.steps()  # complete ones
        step = int(self.name) if self.name.isdecimal() else max(steps, default=None)
        if step not in steps:
            have = f"only checkpoints of steps {', '.join(map(str, steps))}" if steps else "none"
            raise UserError(f"{folder} has no checkpoint {self.name}, {have}: run 'ragrl train'")
        return checkpoints, step


def has_checkpoints(folder: pathlib.Path) -> bool:
    """Whether the folder of a run has a complete checkpoint; a run without steps has none."""
    # Orbax would create a missing folder.
    return (folder / "checkpoints").is_dir() and bool(Checkpoints(folder).steps())


def parse_run(text: str | pathlib.Path) -> RunCheckpoint:
    """Parses `RUN[@CHECKPOINT]`; `UserError` if the name of the checkpoint is not valid."""
    # The last @ counts, unless it is part of a folder that exists.
    folder, at, name = str(text).rpartition("@")
    if not at or local(text).exists():
        return RunCheckpoint(local(text))
    if name not in (NEWEST, BEST) and not name.isdecimal():
        raise UserError(f"{text}: after the @ give {NEWEST}, {BEST} or the number of a step")
    return RunCheckpoint(local(folder), name)
