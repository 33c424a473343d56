"""Small runs of every system as processes, and the digest of the results of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.run.lock import unlock_folder
from jax_ragrl.runtime.jsonl import read_rows
from tests.flags import flags
from tests.training.test_hosts import environments

REPO = pathlib.Path(__file__).parents[2]
SYSTEMS = ("c3po", "coda", "mmoa_rag", "mao_arag", "opera")
STEPS = 4
# The smallest run that still evaluates, saves trees, and writes checkpoints between its steps.
SMALL: Mapping[str, Any] = {
    "data.world.size": 60,
    "run.steps": STEPS,
    "run.questions_per_step": 2,
    "run.save_every": 1,
    "run.eval_every": 2,
    "run.dev_questions": 3,
    "run.save_trees_every": 1,
    "optimizer.minibatches": 1,
    "shapes.prompt_lengths": (288,),
    "shapes.batch_sizes": (16,),
    "packing.row_lengths": (352,),
    "packing.tokens_per_device": 2112,
}
TWO = {"mesh": "(2, -1, 1)", "run.questions_per_step": 3}
RAGRL = ("jax_ragrl.cli.main",)
DEADLINE = 900  # seconds for any run of this size, on a loaded machine
# Starts of the names of metrics that no seed determines: times, and what depends on the servers
# and on earlier attempts at the step.
UNSEEDED = ("time/", "compile/", "tokens_per_sec", "mfu", "server_", "llm_cache_hits")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kind of run.

    Fields:
      system: a config in `configs/tiny`, or in this folder.
      processes: the number of processes of the run.
      changes: further config keys, such as `{"run.staleness": 1}`.
    """

    system: str
    processes: int = 1
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join([self.system, str(self.processes), *map(str, self.changes)])

    def arguments(self) -> list[str]:
        """Returns the arguments of `ragrl` that name the config."""
        values = {**SMALL, **(TWO if self.processes > 1 else {}), **self.changes}
        folder = REPO / ("configs/tiny" if self.system in SYSTEMS else "tests/chaos")
        config = folder / f"{self.system}.py"
        return [f"--config={config}", *(f"--config.{key}={x}" for key, x in values.items())]


class Group:
    """The running processes of one run; their output goes to one file each."""

    def __init__(self, command: Sequence[str], processes: int = 1, module: Sequence[str] = RAGRL):
        """Starts the processes.

        Args:
          command: arguments of `ragrl`.
          processes: the number of processes of the run.
          module: the module that runs the command, and arguments before the command.
        """
        own = environments(processes) if processes > 1 else [{}]
        shared = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags(1),
            "PYTHONPATH": str(REPO),
        }
        self._files = [tempfile.TemporaryFile("w+") for _ in own]  # noqa: SIM115 - read at the end
        program = [sys.executable, "-m", *module, *command]
        self._processes = [
            subprocess.Popen(
                program, cwd=REPO, env=shared | env, stdout=file, stderr=subprocess.STDOUT
            )
            for env, file in zip(own, self._files, strict=True)
        ]

    def send(self, number: int, members: Iterable[int] | None = None) -> None:
        """Sends a signal to the processes with these numbers (default: all) that still live."""
        for i in range(len(self._processes)) if members is None else members:
            if self._processes[i].poll() is None:
                self._processes[i].send_signal(number)

    def lives(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def end(self, seconds: float = DEADLINE) -> Outcome:
        """Waits for all processes; those that live after the deadline are killed."""
        last, is_late = time.monotonic() + seconds, False
        for process in self._processes:
            try:
                process.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                is_late = True
                self.send(signal.SIGKILL)
                process.wait()
        codes = tuple(process.returncode for process in self._processes)
        return Outcome(codes, "".join(map(_content, self._files)), is_late)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How processes ended: exit codes, all output, and whether the deadline ended them."""

    codes: tuple[int, ...]
    output: str
    is_late: bool = False

    @property
    def is_success(self) -> bool:
        return not any(self.codes)

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output

    def messages(self) -> list[str]:
        """Returns the lines that `ragrl` addresses to its user."""
        return [line for line in self.output.splitlines() if line.startswith("ragrl: ")]


def _content(file: Any) -> str:
    file.seek(0)
    with file:
        return file.read()


def train_command(variant: Variant, workdir: pathlib.Path) -> list[str]:
    return ["train", *variant.arguments(), f"--workdir={workdir}"]


def train(
    variant: Variant,
    workdir: pathlib.Path,
    seconds: float = DEADLINE,
    module: Sequence[str] = RAGRL,
) -> Outcome:
    """Trains to the end, undisturbed.

    Args:
      variant: the kind of run.
      workdir: the folder of the run.
      seconds: the deadline.
      module: see `Group`.
    """
    return Group(train_command(variant, workdir), variant.processes, module).end(seconds)


def call(command: Sequence[str], workdir: pathlib.Path) -> Outcome:
    """Runs a command of `ragrl` in this process, which starts and compiles only once.

    Args:
      command: the arguments of `ragrl`.
      workdir: the folder of its run, whose lock is released afterwards.
    """
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always", UserWarning)  # once per call, not once per process
        try:
            code = main(command)
        except BaseException:  # the interpreter would print it and end with 1
            traceback.print_exc()
            code = 1
    unlock_folder(workdir)
    return Outcome((code,), output.getvalue())


def digest(workdir: pathlib.Path) -> str:
    """Returns a hash of all arrays of the newest checkpoint, and of the metrics and trees.

    Arrays and rows are hashed bit by bit, without the metrics of `UNSEEDED`. A run whose newest
    checkpoint cannot be read has no hash, and equals no other run.
    """
    state = hashlib.sha256()
    try:
        arrays = newest_arrays(workdir)
    except UserError as error:
        return f"unreadable: {error}"
    for name, x in sorted(arrays.items()):
        state.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
    for file in ("metrics.jsonl", "trees.jsonl"):
        for row in read_rows(workdir / file):
            state.update(json.dumps(_seeded(row), sort_keys=True).encode())
    return state.hexdigest()[:16]


def _seeded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in row.items() if not name.startswith(UNSEEDED)}


def newest_arrays(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of the newest checkpoint by their paths; their checksums are checked."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with contextlib.closing(Checkpoints(workdir)) as checkpoints:
        newest = checkpoints.latest()
        assert newest is not None, workdir
        meta = checkpoints.meta(newest)
        like = {
            path: jax.ShapeDtypeStruct(shape, meta["checksums"][path][0], sharding=here)
            for path, shape in meta["shapes"].items()
        }
        return jax.device_get(checkpoints.restore(newest, like)[0])
